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

from fastkernels.core import forward_context, registry
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export.exporter import ExportError, export, targets

RUNNER = Path(runner.__file__)
VERSIONS = [(host, version) for host in compare.hosts() for version in compare.versions(host)]
BETWEEN = (("sglang", "0.5.17"), ("vllm", "0.32.0"))  # neither the one that was measured nor the newest
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


def _ours(spec: OpSpec, host: str, found: list[Target]) -> Any:
    classes = {t.path.partition(":")[2]: registry.target_class(t) for t in found}
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
def test_standalone_files_run_alone(host: str, version: str, tmp_path: Path) -> None:
    """All ops of a host version, each from its own file, in one process."""
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


@pytest.mark.parametrize("interpreted", ["0", "1"], ids=["unsupported", "interpreted"])
@pytest.mark.parametrize("host", ["vllm", "sglang", "transformers"])
def test_fork_files_run_kernels_or_the_host(host: str, interpreted: str, tmp_path: Path) -> None:
    """Over a stand-in for the host: on a CPU its code runs, with the same arguments; in Triton's interpreter ours."""
    version, paths, classes = compare.versions(host)[-1], {}, {}
    fork = tmp_path / "fork"
    fork.mkdir()
    for name in registry.op_names():
        found = _targets(registry.get(name), host, version)
        text = exported(name, host, version) if found else ""
        if not found or "Unsupported" not in text:
            continue
        alone = exported(name, host, version, standalone=True)
        (tmp_path / f"{name}.py").write_text(alone.replace(f"fastkernels_{name}_{host}", f"stand_in_{name}"))
        (fork / f"{name}.py").write_text(text)
        ours = {t.path: registry.target_class(t) for t in found if t.seam != "standalone"}
        paths[name] = {
            path: getattr(cls, "live_methods", ("forward",)) if isinstance(cls, type) else ()
            for path, cls in ours.items()
        }
        classes[name] = [t.path.partition(":")[2] for t in found]
    torch.save({"host": host, "paths": paths, "classes": classes}, fork / "forks.pt")
    command = [sys.executable, "-I", str(RUNNER), str(tmp_path), str(fork)]
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(fork / "outputs.pt", weights_only=False)
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


@pytest.mark.parametrize("standalone", [False, True], ids=["fork", "standalone"])
@pytest.mark.parametrize("name, host, version", CASES, ids=lambda v: v)
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
    found = registry.get(name).targets_for(host, version)
    written = found if standalone else [t for t in found if t.seam != "standalone"] or found
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
    """Lines of Triton kernels and embedded CUDA C++."""
    kernels = [
        n for n in tree.body
        if (isinstance(n, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in n.decorator_list))
        or (isinstance(n, ast.Assign) and ast.unparse(n.value).startswith("CudaSource("))
    ]  # fmt: skip
    first = (min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) for n in kernels)
    return sum(n.end_lineno - line + 1 for n, line in zip(kernels, first, strict=True))


MOST = 150  # lines of a file for a fork without its kernels and header
# Files above it, with the reasons in docs/patch.md: (op, host), or the op for all of its hosts. They only shrink.
LARGER = {
    ("grouped_topk", "sglang"): 170, "moe_align": 197, "quantize_fp8": 291, "rms_norm_quant_fp8": 201,
    "silu_mul_quant_fp8": 208, "linear": 406, "attention_decode": 399, "linear_fp8": 809,
    "fused_experts": 865, "fused_experts_fp8": 865, "rotary_emb": 350,
    # Whole classes with all of their parts
    "sampling": 297, "logits_processor": 589, "attention": 875, "parallel_linear": 950, "sparse_moe": 1416,
    ("llama_decoder_layer", "sglang"): 2418, ("qwen3_decoder_layer", "sglang"): 2439, "mixtral_decoder_layer": 2986,
}  # fmt: skip


@pytest.mark.parametrize("name", registry.op_names())
def test_fork_files_are_kernels_and_few_lines(name: str) -> None:
    for host in ("vllm", "sglang", "transformers"):
        version = compare.versions(host)[-1]
        if _targets(registry.get(name), host, version) is None:
            continue
        text = exported(name, host, version)
        lines, kernels = text[text.index("from __future__") :].count("\n"), kernel_lines(ast.parse(text))
        if name in SHORT:
            limit = 280 if (name, host) == ("rms_norm", "transformers") else 250  # six classes
            assert lines <= limit and kernels > 15, host
        else:
            assert lines - kernels <= LARGER.get((name, host), LARGER.get(name, MOST)), host


def test_larger_fork_files_are_still_larger() -> None:
    """A file that meets the common bound has none of its own."""
    for name in LARGER:
        op, host = (
            name if isinstance(name, tuple) else (name, "sglang")
        )  # every op in the list has a class there
        text = exported(op, host, compare.versions(host)[-1])
        lines = text[text.index("from __future__") :].count("\n")
        assert lines - kernel_lines(ast.parse(text)) > MOST, name


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


@pytest.mark.parametrize("name", ["linear", "attention_decode"])
def test_cuda_source_is_embedded(name: str) -> None:
    text = exported(name, "vllm", "0.33.0")
    assert "__global__" in text and "class CudaSource" in text and "__file__" not in text
    if name == "linear":  # parameters are literals: the file reads no table
        assert re.search(r"partial\(linear_\w+, .*\w+=\d+", text) and "tuned" not in text


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
    for name, host, host_version in CASES:
        (tmp_path / f"{name}_{host}_{host_version}.py").write_text(exported(name, host, host_version))
    code = "import pathlib, sys\nfor f in pathlib.Path(sys.argv[1]).glob('*.py'): compile(f.read_text(), f, 'exec')"
    done = subprocess.run([python, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_unknown_host_version_lists_known_ones() -> None:
    with pytest.raises(ExportError, match=r"rms_norm has no class for timm 1.0. It has: .*vllm"):
        export("rms_norm", "timm", "1.0")
    with pytest.raises(registry.UnknownName, match=r"rms_nom.*Did you mean 'rms_norm'"):
        export("rms_nom", "vllm", "0.33.0")
