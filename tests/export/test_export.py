"""Exported files compute the same as our classes without this package, and are short enough to paste."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exported as runner
import pytest
import torch
from fk_integrations.core import signature_diff as compare

from fastkernels.core import cuda_rtc, forward_context, registry
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export import fork
from fastkernels.export.exporter import ExportError, export, fork_targets, printed, targets

RUNNER = Path(runner.__file__)
VERSIONS = [(host, version) for host in compare.hosts() for version in compare.versions(host)]
# neither the one that was measured nor the newest
BETWEEN = (("diffusers", "0.38.0"), ("sglang", "0.5.17"), ("timm", "1.0.30"), ("vllm", "0.32.0"))
exported = cache(export)
# Their norms leave single calls to the host, so that no residual is added twice.
LAYERS = {"llama_decoder_layer", "qwen3_decoder_layer"}
# Files of at most 250 lines with their kernels, without the header
SHORT = ("rms_norm", "silu_and_mul")


def _targets(spec: OpSpec, host: str, version: str) -> list[Target] | None:
    """The op's targets there, [] for a purely functional op, None if it is not for that host version."""
    try:
        return targets(spec, host, version)
    except ExportError:
        return None


def _fork_targets(spec: OpSpec, host: str, version: str) -> list[Target] | None:
    """Those that the file for a fork replaces; None if there is no such file."""
    try:
        return printed(fork_targets(spec, host, version))
    except ExportError:
        return None


def _ours(spec: OpSpec, host: str, found: list[Target]) -> Any:
    classes = {t.path.partition(":")[2]: registry.target_class(t) for t in reversed(found)}
    # A host's function may have our op's name.
    names = classes if spec.op is None else {spec.name: spec.op, **classes}
    return SimpleNamespace(
        classes=list(classes), host=host, **names,
        AttentionMetadata=forward_context.AttentionMetadata, forward_context=forward_context.forward_context,
    )  # fmt: skip


def _inputs(spec: OpSpec) -> list[Any] | None:
    if any(t.path.partition(":")[2] == spec.name for t in spec.targets):
        return None  # the name is the host's function in the file, which the exercise calls
    case = next((c for c in spec.cases if "odd" in c.tags), spec.cases[0])
    return spec.inputs(case, "cpu", torch.Generator().manual_seed(3)) if spec.op is not None else None


def _same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    else:
        assert a == b or (a is None and b is None)


@pytest.mark.parametrize(
    "host, version",
    [pytest.param(*v, marks=[pytest.mark.slow] if v in BETWEEN else []) for v in VERSIONS],
    ids=lambda v: v,
)
def test_standalone_files_run_alone(
    host: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ops of a host version, each from its own file, in one process."""
    monkeypatch.setenv(
        "FASTKERNELS_PROVIDER", "attention_dense:reference"
    )  # files do without PyTorch's attention
    registry.get("attention_dense").op.forget()
    namespaces, inputs = {}, {}
    for name in registry.op_names():
        spec = registry.get(name)
        found = _targets(spec, host, version)
        if found is None:
            continue
        assert not found or name in runner.EXERCISES, f"tests/support/exported.py has no exercise for {name}"
        text = exported(name, host, version, standalone=True)
        (tmp_path / f"{name}.py").write_text(text)
        namespaces[name] = _ours(spec, host, found)
        made = _inputs(spec)
        if made is not None:
            inputs[name] = made
    classes = {name: ns.classes for name, ns in namespaces.items()}
    torch.save({"host": host, "classes": classes, "inputs": inputs}, tmp_path / "inputs.pt")
    command = [sys.executable, "-I", str(RUNNER), str(tmp_path)]
    # Sums over a row depend on how many threads share it.
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = torch.load(tmp_path / "outputs.pt", weights_only=False)
    ours = runner.run(namespaces, inputs)
    assert set(theirs) == set(ours) == set(namespaces)
    for name, outputs in ours.items():
        assert outputs, f"{name}: nothing was compared"
        _same(outputs, theirs[name])
    registry.get("attention_dense").op.forget()


@pytest.mark.parametrize("interpreted", ["0", "1"], ids=["unsupported", "interpreted"])
@pytest.mark.parametrize("host", ["vllm", "sglang", "transformers"])
def test_fork_files_run_kernels_or_the_host(host: str, interpreted: str, tmp_path: Path) -> None:
    """Over a stand-in for the host: on a CPU its code runs, with the same arguments; in Triton's interpreter ours."""
    version, paths, classes = compare.versions(host)[-1], {}, {}
    pasted = tmp_path / "fork"
    pasted.mkdir()
    for name in registry.op_names():
        found = _fork_targets(registry.get(name), host, version)
        text = exported(name, host, version) if found else ""
        if not found or "Unsupported" not in text:
            continue
        alone = exported(name, host, version, standalone=True)
        (tmp_path / f"{name}.py").write_text(alone.replace(f"fastkernels_{name}_{host}", f"stand_in_{name}"))
        (pasted / f"{name}.py").write_text(text)
        ours = {t.path: registry.target_class(t) for t in found}
        paths[name] = {
            path: getattr(cls, "live_methods", ("forward",)) if isinstance(cls, type) else ()
            for path, cls in ours.items()
        }
        classes[name] = [t.path.partition(":")[2] for t in found]
    torch.save({"host": host, "paths": paths, "classes": classes}, pasted / "forks.pt")
    command = [sys.executable, "-I", str(RUNNER), str(tmp_path), str(pasted)]
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(pasted / "outputs.pt", weights_only=False)
    for name, outputs in found["theirs"].items():
        assert outputs, f"{name}: nothing was compared"
        _same(found["ours"][name], outputs)
    expected = set(paths) & {"l2_norm"}  # an output dtype that the kernel does not support
    if interpreted == "0":
        expected = set(paths) - LAYERS - {"linear_fp8"}  # its op has PyTorch's product as a fallback
    assert set(found["fallbacks"]) == expected


CALL = """
import importlib, sys, torch
sys.path.insert(0, sys.argv[1])
outputs = {}
for name, args in torch.load(f"{sys.argv[1]}/inputs.pt").items():
    module = importlib.import_module(name)
    try:
        outputs[name] = [getattr(module, name)(*args), *args]
    except module.Unsupported:
        outputs[name] = None
torch.save(outputs, f"{sys.argv[1]}/outputs.pt")
"""


@pytest.mark.parametrize("interpreted", ["0", "1"], ids=["unsupported", "interpreted"])
def test_functional_fork_files_run_kernels_or_raise(interpreted: str, tmp_path: Path) -> None:
    inputs = {}
    for name in registry.op_names():
        spec = registry.get(name)
        if not spec.targets:
            (tmp_path / f"{name}.py").write_text(exported(name, "vllm", "0.33.0"))
            case = [c for c in spec.cases if "odd" in c.tags][-1]
            inputs[name] = spec.inputs(case, "cpu", torch.Generator().manual_seed(3))
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", CALL, str(tmp_path)]
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = torch.load(tmp_path / "outputs.pt")
    unsupported = {name for name, found in outputs.items() if found is None}
    # Its kernel is CUDA C++, which no interpreter runs.
    assert unsupported == (set(inputs) if interpreted == "0" else {"attention_decode"})
    for name in set(inputs) - unsupported:
        args = inputs[name]
        theirs = [registry.get(name).op(*args), *args]  # an op may write to its arguments
        for ours, expected in zip(outputs[name], theirs, strict=True):
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(ours.float(), expected.float(), rtol=2e-2, atol=2e-2)


CASES = [
    (name, host, version)
    for name in registry.op_names()
    for host, version in VERSIONS
    if _targets(registry.get(name), host, version) is not None
]


FORKS = [case for case in CASES if _fork_targets(registry.get(case[0]), *case[1:]) is not None]


@pytest.mark.parametrize(
    "name, host, version, standalone", [(*c, False) for c in FORKS] + [(*c, True) for c in CASES], ids=str
)
def test_file_imports_only_torch_triton_and_host(
    name: str, host: str, version: str, standalone: bool
) -> None:
    """At the top level: torch, triton, the standard library; the classes to replace are imported from the host."""
    text = exported(name, host, version, standalone)
    assert text == export(name, host, version, standalone)
    tree = ast.parse(text, feature_version=(3, 10))
    bound = {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    bound |= {
        t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    written = (_targets if standalone else _fork_targets)(registry.get(name), host, version)
    assert {target.path.partition(":")[2] for target in written} <= bound
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for origin in (n.partition(".")[0] for n in names):
            assert (origin == host and not standalone) or (origin not in runner.BANNED and origin != "")
            if node in tree.body:
                assert origin in {"torch", "triton", host, *sys.stdlib_module_names}, origin
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n# Copyright The FastKernels Authors\n")
    assert f"for {host} {version}:" in text and "Exported from FastKernels" in text


def kernel_lines(tree: ast.Module) -> int:
    """Lines of Triton kernels, embedded CUDA C++ and functions that write CUDA C++."""
    kernels = [
        n for n in tree.body
        if any("triton.jit" in ast.unparse(d) for d in getattr(n, "decorator_list", ()))
        or any(isinstance(c, ast.Constant) and re.search("__(device|global)__", str(c.value)) for c in ast.walk(n))
    ]  # fmt: skip
    first = (min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) for n in kernels)
    return sum(n.end_lineno - line + 1 for n, line in zip(kernels, first, strict=True))


MOST = 150  # lines of a file for a fork without its kernels and header
# Files above it, with the reasons in docs/patch.md: (op, host), or the op for all of its hosts. They only shrink.
LARGER = {
    ("quantize_fp8", "vllm"): 220, ("quantize_fp8", "sglang"): 250, ("rms_norm_quant_fp8", "vllm"): 158,
    ("grouped_topk", "sglang"): 154, "linear": 290, "attention_decode": 358, ("linear_fp8", "vllm"): 478,
    ("linear_fp8", "sglang"): 555, "fused_experts": 372, "fused_experts_fp8": 623,
    "fused_experts_swigluoai": 251, "fused_experts_int4": 256,
}  # fmt: skip


@pytest.mark.parametrize("name", registry.op_names())
def test_fork_files_are_kernels_and_few_lines(name: str) -> None:
    for host in ("vllm", "sglang", "transformers"):
        version = compare.versions(host)[-1]
        if _fork_targets(registry.get(name), host, version) is None:
            continue
        text = exported(name, host, version)
        lines, kernels = text[text.index("from __future__") :].count("\n"), kernel_lines(ast.parse(text))
        if name in SHORT:
            limit = 280 if (name, host) == ("rms_norm", "transformers") else 250  # six classes
            assert lines <= limit and kernels > 15, host
        else:
            assert lines - kernels <= LARGER.get((name, host), LARGER.get(name, MOST)), host
        python = [
            line for line in text.split("\n") if re.match(r" *(return|\w+ = guarded|\w+ = register)\b", line)
        ]
        assert max(map(len, python), default=0) <= 120, host


def test_larger_fork_files_are_still_larger() -> None:
    """A file that meets the common bound has none of its own."""
    for name in LARGER:
        op, host = (
            name if isinstance(name, tuple) else (name, "sglang")
        )  # every op in the list has a class there
        text = exported(op, host, compare.versions(host)[-1])
        lines = text[text.index("from __future__") :].count("\n")
        assert lines - kernel_lines(ast.parse(text)) > MOST, name


def test_fork_file_has_one_function_of_a_name() -> None:
    """Two functions of ours stand for apply_rotary_pos_emb of different models: each file has its own."""
    path, version = "transformers.models.{0}.modeling_{0}", compare.versions("transformers")[-1]
    printed = exported("rotary_emb", "transformers", version)
    llama, olmo = (
        export("rotary_emb", "transformers", version, only=path.format(model)) for model in ("llama", "olmo2")
    )
    for text in (printed, llama, olmo):
        assert text.count("\ndef apply_rotary_pos_emb(") == 1
    assert (
        "promote_types(q.dtype, cos.dtype)  #" in llama and "rounds = " in olmo and "rounds = " not in llama
    )


def test_fork_file_replaces_methods_of_the_host_class(tmp_path: Path) -> None:
    """In real transformers, without this package: the class is the host's with our forward."""
    (tmp_path / "pasted.py").write_text(exported("rms_norm", "transformers", "5.19.0"))
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
sys.modules.update(dict.fromkeys(["fastkernels", "fk_integrations", "fk_bench"]))  # importing them fails
import pasted
from transformers.models.llama import modeling_llama as host
assert issubclass(pasted.LlamaRMSNorm, host.LlamaRMSNorm) and pasted.LlamaRMSNorm is not host.LlamaRMSNorm
assert set(vars(pasted.LlamaRMSNorm)) - {"__module__", "__doc__"} == {"forward"}
for shape, dtype in (((5, 63), torch.float32), ((2, 3, 1000), torch.bfloat16)):
    ours, theirs = pasted.LlamaRMSNorm(shape[-1], 1e-5).to(dtype), host.LlamaRMSNorm(shape[-1], 1e-5).to(dtype)
    ours.weight.data.normal_(1.0, 0.1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), theirs(x))
print("same")
"""
    for interpreted in ("0", "1"):
        env = {**os.environ, "TRITON_INTERPRET": interpreted}
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, env=env
        )
        assert done.stdout.endswith("same\n"), done.stderr[-3000:]


COMPILED = """
import importlib, os, sys, types
import torch
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
sys.modules.update(dict.fromkeys(["fastkernels", "fk_integrations", "fk_bench"]))  # importing them fails
for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.linear"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.model_executor.layers.linear"].UnquantizedLinearMethod = type("UnquantizedLinearMethod", (), {})
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2])
file = importlib.import_module(sys.argv[3])
found = []
class Kernel:
    def __init__(self, source, name, options, device, types, shared):
        code = file._cubin(source, ("--gpu-architecture=sm_90a", *options))
        found.append((name, options, code[:4]))
    def launch(self, *args, **kwargs): ...
# All but the launch runs as on a GPU.
file.Kernel, file.INTERPRETED, file.tensor_map = Kernel, True, lambda *args: None
file.supports_wgmma = file.supports_cuda = lambda *args: None
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
if sys.argv[3] == "linear":
    file._run_linear(torch.zeros(4, 512).bfloat16(), torch.zeros(16896, 512).bfloat16())
else:
    cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)
    table = torch.zeros(1, 2, dtype=torch.int32)
    lengths = torch.tensor([20], dtype=torch.int32)
    query = torch.zeros(1, 8, 128).bfloat16()
    file._run_attention_decode(query, cache, cache, lengths, table, 32, 0.1, -1, 0.0, 1.0, 1.0)
(kernel,) = found
print(*kernel)
assert kernel[2] == b"\x7fELF", kernel
wrong = [f for f in opened if f.endswith((".cu", ".cuh", ".json")) or "fastkernels/" in f]
assert not wrong and not os.listdir(), wrong
"""


@pytest.mark.skipif(cuda_rtc.unavailable() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize(
    "name, winner",
    [("linear", ("-DROWS=128", "-DAHEAD=2", "-DSPLITS=1")), ("attention_decode", ("-DKEYS=16",))],
)
def test_cuda_files_compile_their_own_source(name: str, winner: tuple[str, ...], tmp_path: Path) -> None:
    """In an empty folder, without this package: the source and the tuned parameters are in the file."""
    empty, folder = tmp_path / "empty", tmp_path / "exports"
    empty.mkdir()
    folder.mkdir()
    (folder / f"{name}.py").write_text(exported(name, "vllm", "0.33.0"))
    command = [sys.executable, "-I", "-B", "-c", COMPILED, str(folder), str(empty), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"'{option}'" in done.stdout for option in winner), done.stdout


@pytest.mark.parametrize("host, version", [("vllm", "0.33.0"), ("sglang", "0.5.23")])
@pytest.mark.parametrize("ours, theirs, ran", [(1, 1, "ours"), (0, 1, "host"), (0, 0, "plain")])
def test_fp8_calls_run_the_host_kernel_before_pytorch(
    host: str, version: str, ours: int, theirs: int, ran: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is for the host's kernel, not for a product in float32."""
    text = exported("linear_fp8", host, version)
    for line in re.findall(rf"^from ({host}\S*) import (\w+)", text, re.MULTILINE):
        setattr(runner.host_module(line[0]), line[1], type(line[1], (), {}))
    for module in [m for m in sys.modules if m.partition(".")[0] == host]:
        monkeypatch.setitem(sys.modules, module, sys.modules.pop(module))  # gone after the test
    (tmp_path / f"{host}_{ran}.py").write_text(text.replace("fastkernels_linear_fp8", f"test_{ran}"))
    file = runner.load(tmp_path / f"{host}_{ran}.py")
    kernel = {"vllm": "cutlass", "sglang": "sgl"}[host]
    names = {"linear_fp8_wgmma": "ours", f"linear_fp8_{kernel}": "host", "reference": "plain"}
    for name, result in names.items():
        assert hasattr(file, name)
        setattr(file, name, lambda *args, result=result: result)
    file.supports_wgmma_fp8 = lambda *args: None if ours else "unsupported"
    setattr(file, f"supports_{kernel}", lambda *args: None if theirs else "unsupported")
    assert file._run_linear_fp8(SimpleNamespace(is_cuda=True)) == ran
    assert file._run_linear_fp8(SimpleNamespace(is_cuda=False)) == "plain"


def test_fork_file_leaves_other_ops_to_their_files() -> None:
    """Two ops replace the same function; each file has the kernels of one."""
    for host, version in (("vllm", "0.33.0"), ("sglang", "0.5.23")):
        plain, fp8 = (exported(name, host, version) for name in ("fused_experts", "fused_experts_fp8"))
        assert "torch.float8" not in plain and "torch.float8" in fp8
        assert "_run_fused_experts_fp8" not in plain and "fused_experts_fp8(" not in plain
        assert ".requested" not in plain + fp8  # an attribute that only ops of this package have


@pytest.mark.parametrize("name, host, version", FORKS, ids=str)
def test_no_fork_file_reads_a_file(name: str, host: str, version: str) -> None:
    text = exported(name, host, version)
    assert not re.search(r"__file__|\bopen\(|importlib\.resources|tuned/|json\.load", text)


def _python(version: str) -> str | None:
    """An interpreter of that version that runs: on the path, or pyenv's."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for python in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", ["3.10", pytest.param("3.13", marks=pytest.mark.slow)])
def test_exported_files_parse_under(version: str, tmp_path: Path) -> None:
    python = _python(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    for name, host, host_version in FORKS:
        (tmp_path / f"{name}_{host}_{host_version}.py").write_text(exported(name, host, host_version))
    code = "import pathlib, sys\nfor f in pathlib.Path(sys.argv[1]).glob('*.py'): compile(f.read_text(), f, 'exec')"
    done = subprocess.run([python, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, host, instead",
    [
        ("sampling", "vllm", "Use --standalone"),
        ("logits_processor", "vllm", "Use --standalone"),
        ("attention", "sglang", "attention_prefill, attention_decode"),
        ("llama_decoder_layer", "sglang", "rms_norm"),
    ],
)
def test_class_built_anew_is_not_for_a_fork(name: str, host: str, instead: str) -> None:
    """It would lose what the host calls on its own class."""
    with pytest.raises(ExportError, match=f"{name} has no file for a fork of {host}.*would lose.*{instead}"):
        export(name, host, compare.versions(host)[-1])
    assert exported(name, host, compare.versions(host)[-1], standalone=True)


def test_standalone_class_refuses_the_hosts_subclasses(tmp_path: Path) -> None:
    """They override methods that it does not have, or use attributes of the host's class."""
    (tmp_path / "alone.py").write_text(exported("rotary_emb", "vllm", "0.33.0", standalone=True))
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import alone
class Own(alone.RotaryEmbedding): ...
try:
    class YaRN(alone.RotaryEmbedding):
        __module__ = "vllm.model_executor.layers.rotary_embedding.yarn"
        def _compute_inv_freq(self, scale): ...
except TypeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert "YaRN needs the class of vllm: in a fork, export rotary_emb without" in done.stdout, done.stderr


SUBCLASSES = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vllm.model_executor.layers import rotary_embedding as host
ours, theirs = host.RotaryEmbedding, host.HostRotaryEmbedding
assert ours is not theirs and issubclass(ours, theirs)
class Table(ours):
    def _compute_inv_freq(self): return 3
class Native(ours):
    def forward_native(self, *args): return "native"
class Mixin:
    def forward_cuda(self, *args): return "cuda"
class Mixed(Mixin, ours): ...
class Further(Native): ...
class Whole(ours):
    def forward(self, *args): return "whole"
    def forward_native(self, *args): return "native"
assert Table.forward is ours.forward and Table()._compute_inv_freq() == 3
assert Native.forward is Further.forward is Mixed.forward is theirs.forward
assert Native()(1, 2) == Further()(1, 2) == "native" and Whole()(1, 2) == "whole"
assert ours()(torch.arange(3), torch.zeros(3, 8)) == ("dispatched", None)
assert host.base.__file__.endswith("base.py") and ours.enabled() and ours().extra() == 5
"""
HOST_ROPE = """
import torch
class RotaryEmbedding(torch.nn.Module):
    head_size, is_neox_style, cos_sin_cache = 8, True, torch.zeros(9, 8)
    enabled = classmethod(lambda cls: True)
    def forward(self, *args): return self.forward_native(*args)
    def forward_native(self, positions, query, key=None): return "dispatched", key
    def forward_cuda(self, *args): return self.forward_native(*args)
    def extra(self): return 5
HostRotaryEmbedding = RotaryEmbedding
"""


def _fork_of_a_rope(folder: Path) -> Path:
    rope = folder / "vllm/model_executor/layers/rotary_embedding"
    rope.mkdir(parents=True)
    for package in (rope, *rope.parents[:3]):
        (package / "__init__.py").touch()
    (rope / "base.py").write_text(HOST_ROPE)
    for target in registry.get("rotary_emb").targets_for("vllm", "0.33.0"):
        module, _, name = target.path.partition(":")
        file = rope / f"{module.rpartition('.')[2]}.py"
        if file.name != "base.py":
            text = file.read_text() if file.is_file() else "from .base import *\n"
            file.write_text(f"{text}class {name}(RotaryEmbedding): ...\n")
    (rope / "__init__.py").write_text("from .base import RotaryEmbedding, HostRotaryEmbedding\n")
    return rope


def test_fork_class_keeps_what_subclasses_override(tmp_path: Path) -> None:
    """A subclass with tables of its own gets our forward, one with another computation the host's."""
    rope = _fork_of_a_rope(tmp_path)
    os.link(rope / "base.py", tmp_path / "linked.py")
    files = fork.put("rotary_emb", "vllm", "0.33.0", tmp_path)
    assert rope / "fk_rotary_emb_base.py" in files and (tmp_path / "linked.py").read_text() == HOST_ROPE
    once = (rope / "base.py").read_text()
    assert once.endswith("rotary_embedding.fk_rotary_emb_base import RotaryEmbedding  # noqa: E402, F811\n")
    fork.put("rotary_emb", "vllm", "0.33.0", tmp_path)
    assert (rope / "base.py").read_text() == once
    command = [sys.executable, "-c", SUBCLASSES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_function_of_a_package_is_replaced_in_its_init(tmp_path: Path) -> None:
    """SGLang's fp8_scaled_mm is defined in sglang/kernels/ops/gemm/__init__.py."""
    targets = registry.get("linear_fp8").targets_for("sglang", "0.5.23")
    for target in targets:
        module, _, name = target.path.partition(":")
        path = tmp_path.joinpath(*module.split("."))
        file = path / "__init__.py" if module.endswith("ops.gemm") else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(f"def {name}(): ...\n")
    (tmp_path / "sglang" / "__init__.py").touch()
    written = fork.put("linear_fp8", "sglang", "0.5.23", tmp_path)
    package = tmp_path / "sglang" / "kernels" / "ops" / "gemm"
    assert package / "fk_linear_fp8_gemm.py" in written
    assert "from sglang.kernels.ops.gemm.fk_linear_fp8_gemm import" in (package / "__init__.py").read_text()


PACKED = """
import sys, types
import torch
for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.quantization"):
    sys.modules[name] = types.ModuleType(name)
host = sys.modules["sglang.srt.layers.quantization.unquant"] = types.ModuleType("unquant")
class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return "the host's"
host.UnquantizedLinearMethod = UnquantizedLinearMethod
sys.path.insert(0, sys.argv[1])
import pasted
layer = torch.nn.Linear(8, 4, bias=False)
x = torch.randn(3, 8)
torch.testing.assert_close(pasted.UnquantizedLinearMethod().apply(layer, x), layer(x))
layer.use_intel_amx_backend = True
assert pasted.UnquantizedLinearMethod().apply(layer, x) == "the host's"
"""


def test_weights_packed_by_sglang_go_to_its_method(tmp_path: Path) -> None:
    """On a CPU with AMX, SGLang reorders a weight in place and keeps its shape."""
    (tmp_path / "pasted.py").write_text(exported("linear", "sglang", "0.5.23"))
    command = [sys.executable, "-c", PACKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_class_attribute_of_a_kept_method_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = exported("fused_experts", "sglang", "0.5.23")
    assert "    combine = HostStandardCombineInput\n" in text
    assert "standard import StandardCombineInput as HostStandardCombineInput\n" in text
    (target,) = (
        t for t in registry.get("fused_experts").targets_for("sglang", "0.5.23") if "MoeRunner" in t.path
    )
    monkeypatch.delattr(registry.target_class(target), "host_attributes")
    with pytest.raises(ExportError, match=r"SGLangMoeRunner.run reads self.combine of SGLangMoeRunner"):
        export("fused_experts", "sglang", "0.5.23")


def test_fork_of_another_version_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has no package 'vllm'"):
        fork.put("rotary_emb", "vllm", "0.33.0", tmp_path)
    rope = _fork_of_a_rope(tmp_path)
    (rope / "base.py").write_text("class Rope: ...\n")
    with pytest.raises(ExportError, match=r"base.py does not define RotaryEmbedding: is this vllm 0.33.0\?"):
        fork.put("rotary_emb", "vllm", "0.33.0", tmp_path)
    assert not list(rope.glob("fk_*")) and (rope / "base.py").read_text() == "class Rope: ...\n"
    with pytest.raises(ExportError, match="no class or function of vllm has the op softplus"):
        fork.put("softplus", "vllm", "0.33.0", tmp_path)


def test_unknown_host_version_lists_known_ones() -> None:
    with pytest.raises(ExportError, match=r"rms_norm has no class for keras 1.0. It has: .*vllm"):
        export("rms_norm", "keras", "1.0")
    with pytest.raises(registry.UnknownName, match=r"rms_nom.*Did you mean 'rms_norm'"):
        export("rms_nom", "vllm", "0.33.0")
