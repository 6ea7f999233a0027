"""Exported files compute the same as our classes without this package, and are short enough to paste."""

from __future__ import annotations

import ast
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exported as runner
import pytest
import torch
from fk_integrations.signatures import diff as compare
from support.kernels import warm

from fastkernels.core import cuda_rtc, forward_context, registry
from fastkernels.core.dispatch import OPS
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export import fork, source
from fastkernels.export.exporter import (
    INSTEAD,
    NO_PLACE,
    OWN,
    ExportError,
    export,
    fork_targets,
    printed,
    targets,
)
from fastkernels.overrides.attention import attention_decode_cuda
from fastkernels.overrides.linear.kernels import linear_fp8_scales, wgmma_linear_cuda, wgmma_linear_fp8_cuda

RUNNER = Path(runner.__file__)
VERSIONS = [(host, version) for host in compare.hosts() for version in compare.versions(host)]
# Hosts whose standalone files are tested in `make test`
STANDALONE = ("vllm", "sglang", "transformers")
NEWEST = {(host, compare.versions(host)[-1]) for host in STANDALONE}
# Their norms leave single calls to the host, so that no residual is added twice.
LAYERS = {"llama_decoder_layer", "qwen3_decoder_layer", "patch_merger"}
# Files of at most 250 lines with their kernels, without the header
SHORT = ("rms_norm", "silu_and_mul", "rotary_emb")


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


@cache
def _alike(name: str, host: str, version: str, standalone: bool = False) -> str:
    """The newest version of the host whose file replaces the same classes and functions as that of `version`."""
    spec, of = registry.get(name), _targets if standalone else _fork_targets
    found = of(spec, host, version)
    return next(v for v in reversed(compare.versions(host)) if of(spec, host, v) == found)


@cache
def exported(name: str, host: str, version: str, standalone: bool = False) -> str:
    """The file's text, made once for all versions that differ in the header alone."""
    newest = _alike(name, host, version, standalone)
    if newest == version:
        return export(name, host, version, standalone)
    text = exported(name, host, newest, standalone)
    return text.replace(f" for {host} {newest}:", f" for {host} {version}:", 1)


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
    [pytest.param(*v, marks=[] if v in NEWEST else [pytest.mark.slow]) for v in VERSIONS],
    ids=lambda v: v,
)
def test_standalone_files_run_alone(
    host: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ops of a host version, each from its own file, in one process; of an older version those that differ."""
    # Files do without PyTorch's attention and the C++ kernels of a CPU, which round otherwise.
    plain = ("attention_dense", "attention_pair_bias", "conv1d_norm_mish", "rms_norm", "silu_and_mul")
    monkeypatch.setenv("FASTKERNELS_PROVIDER", ",".join(f"{name}:reference" for name in plain))
    for name in plain:
        OPS[name].forget()
    namespaces, inputs = {}, {}
    for name in registry.op_names():
        spec = registry.get(name)
        found = _targets(spec, host, version)
        if found is None or (not found and host != "vllm"):
            continue  # the file of a function is the same for all hosts
        if _alike(name, host, version, True) != version:
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
    # Sums over a row depend on how many threads share it.
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = warm.run([RUNNER, tmp_path], env, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = torch.load(tmp_path / "outputs.pt", weights_only=False)
    ours = runner.run(namespaces, inputs)
    assert set(theirs) == set(ours) == set(namespaces)
    for name, outputs in ours.items():
        assert outputs, f"{name}: nothing was compared"
        _same(outputs, theirs[name])
    for name in plain:
        OPS[name].forget()


@pytest.mark.parametrize(
    ("host", "interpreted"),
    [
        pytest.param("vllm", "0", id="vllm-unsupported"),
        pytest.param("vllm", "1", id="vllm-interpreted"),
        pytest.param("sglang", "0", id="sglang-unsupported", marks=pytest.mark.slow),
        pytest.param("sglang", "1", id="sglang-interpreted"),
        pytest.param("transformers", "0", id="transformers-unsupported", marks=pytest.mark.slow),
        pytest.param("transformers", "1", id="transformers-interpreted", marks=pytest.mark.slow),
    ],
)
def test_fork_files_run_kernels_or_the_host(host: str, interpreted: str, tmp_path: Path) -> None:
    """Over a stand-in for the host: on a CPU its code runs, with the same arguments; in Triton's interpreter ours.

    test_fork_experts_multiply_or_run_the_host is for ops in whose place a fork has a smaller function.
    """
    version, paths, classes = compare.versions(host)[-1], {}, {}
    pasted = tmp_path / "fork"
    pasted.mkdir()
    for name in registry.op_names():
        found = _fork_targets(registry.get(name), host, version)
        text = exported(name, host, version) if found else ""
        if not found or "Unsupported" not in text or (name, host) in INSTEAD:
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
    env = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = warm.run([RUNNER, tmp_path, pasted], env, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(pasted / "outputs.pt", weights_only=False)
    for name, outputs in found["theirs"].items():
        assert outputs, f"{name}: nothing was compared"
        _same(found["ours"][name], outputs)
    # l2_norm has an output dtype that the kernel does not support; the kernel of linear_fp8 is CUDA C++. One call of
    # quantize_fp8 has a scale of the tensor, or pads rows.
    expected = set(paths) & {"l2_norm", "linear_fp8", "quantize_fp8"}
    if interpreted == "0":
        expected = set(paths) - LAYERS
    assert set(found["fallbacks"]) == expected


EXPERTS = """
import importlib, sys, types
import torch
folder, host, path = sys.argv[1:]
module, _, name = path.partition(":")
parts, left = module.split("."), []
for i in range(len(parts)):
    sys.modules[".".join(parts[: i + 1])] = types.ModuleType(parts[i])
theirs = sys.modules[module]
setattr(theirs, name, lambda *args, **options: left.append((args, options)))
def quantized(a, scale=None, use_per_token_if_dynamic=False):
    scale = a.float().abs().amax(1, keepdim=True) / 448 if scale is None else scale
    return (a.float() / scale).to(torch.float8_e4m3fn), scale
def grouped(a, size):
    q, scale = quantized(a.reshape(-1, size))
    return q.view(a.shape), scale.view(len(a), -1)
theirs.scaled_fp8_quant, theirs.sglang_per_token_group_quant_fp8 = quantized, grouped
sys.path.insert(0, folder)
files = {op: importlib.import_module(op) for op in ("fused_experts", "fused_experts_fp8")}
torch.manual_seed(0)
T, TOPK, E, N, K, M = 9, 2, 4, 192, 256, 16
ids = torch.randint(0, E, (T, TOPK))
weights, flat = torch.rand(T, TOPK), ids.flatten()
rows, blocks = [], []
for e in range(E):  # the last expert is on another rank
    mine = (flat == e).nonzero().flatten().tolist()
    for at in range(0, len(mine), M):
        rows += (mine[at : at + M] + [T * TOPK] * M)[:M]
        blocks.append(e if e < E - 1 else -1)
rows, blocks, total = (torch.tensor(x, dtype=torch.int32) for x in (rows, blocks, [len(rows)]))
single = (None, flat.int(), torch.tensor([T * TOPK * M], dtype=torch.int32))  # vLLM's few pairs, not sorted
def call(op, a, b, c, a_scale, b_scale, mul, topk, fp8, sorting=(rows, blocks, total), block_shape=None, m=M, **more):
    head = (a, b, c, a_scale, b_scale) if host == "vllm" else (a, b, None, c, a_scale, b_scale, None)
    of_ids = () if host == "vllm" else (ids,)
    flags = (fp8, False, False, False, a_scale is None or a_scale.numel() > 1)
    getattr(files[op], name)(*head, weights, *of_ids, *sorting, mul, topk, {"BLOCK_SIZE_M": m}, None, *flags,
                             block_shape=block_shape, **more)
def expected(a, b, mul, last=True):
    y = torch.stack([b[e] @ a[i // (TOPK if len(a) == T else 1)] for i, e in enumerate(flat.tolist())])
    y *= weights.view(-1, 1) if mul else 1
    return torch.where((flat == E - 1)[:, None] & last, 0.0, y)
def close(c, y):
    torch.testing.assert_close(c.view(T * TOPK, N).float(), y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))
x, w = torch.randn(T, K).half(), torch.randn(E, N, K).half() / 16
for a, topk, mul in ((x, TOPK, False), (torch.randn(T * TOPK, K).half(), 1, True)):
    c = torch.full((T, TOPK, N), float("nan")).half()
    call("fused_experts", a, w, c, None, None, mul, topk, False)
    close(c, expected(a.float(), w.float(), mul))
    if host == "vllm":
        call("fused_experts", a, w, c, None, None, mul, topk, False, single)
        close(c, expected(a.float(), w.float(), mul, False))
assert not left
q, of_rows = quantized(w.reshape(E * N, K))
q, of_rows = q.view(E, N, K), of_rows.view(E, N, 1)
blocks_of_w = torch.rand(E, 2, 2) + 0.5
of_experts = torch.rand(E) + 0.5
for scale, wide, shape in ((of_rows, of_rows, None), (of_experts, of_experts.view(E, 1, 1), None), (
    blocks_of_w, blocks_of_w.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :N], [128, 128]
)):
    a, a_scale = grouped(x, 128) if shape else quantized(x, torch.tensor([0.01]) if scale is of_experts else None)
    full = a.float() * (a_scale.repeat_interleave(128, 1) if shape else a_scale)
    given = (x, a_scale if scale is of_experts else None) if host == "sglang" else (a, a_scale)
    c = torch.full((T, TOPK, N), float("nan")).half()
    call("fused_experts_fp8", given[0], q, c, given[1], scale, False, TOPK, True, block_shape=shape)
    close(c, expected(full, q.float() * wide, False))
assert not left
c = torch.empty(T, TOPK, N).half()
call("fused_experts", x, q, c, None, of_rows, False, TOPK, True)  # of the other file
call("fused_experts_fp8", x, w, c, None, None, False, TOPK, False)
call("fused_experts", x, w, c, None, None, False, TOPK, False, m=256)
call("fused_experts", x.float(), w.float(), c, None, None, False, TOPK, False)
if host == "sglang":
    call("fused_experts", x, w, c, None, None, False, TOPK, False, c_sorted=True, filter_expert=False)
    assert left[-1][1] == {"c_sorted": True, "filter_expert": False}
assert len(left) == 4 + (host == "sglang") and left[0][0][0] is x
"""


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_fork_experts_multiply_or_run_the_host(host: str, tmp_path: Path) -> None:
    """In Triton's interpreter, over stand-ins for the host's launch and its quantization."""
    version = compare.versions(host)[-1]
    for op in ("fused_experts", "fused_experts_fp8"):
        (tmp_path / f"{op}.py").write_text(exported(op, host, version))
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", EXPERTS, tmp_path, host, INSTEAD["fused_experts", host].path], env)
    assert done.returncode == 0, done.stderr[-3000:]


FLUX = """
import importlib, sys
import torch
from diffusers import FluxTransformer2DModel
sys.path.insert(0, sys.argv[1])
torch.manual_seed(0)
model = FluxTransformer2DModel(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
).eval()
for p in model.parameters():
    p.data += 0.1 * torch.randn_like(p)
given = dict(
    hidden_states=torch.randn(2, 9, 4), encoder_hidden_states=torch.randn(2, 5, 32), img_ids=torch.randn(9, 3),
    pooled_projections=torch.randn(2, 32), timestep=torch.tensor([1.0, 0.5]), txt_ids=torch.zeros(5, 3),
)
calls = {}
def counted(name, function):
    def call(*args):
        found = function(*args)
        calls[name] = calls.get(name, 0) + 1
        return found
    return call
with torch.no_grad():
    theirs = model(**given).sample
    for name in ("gated_residual", "ada_layer_norm", "qk_norm_rope"):
        file = importlib.import_module(f"pasted_{name}")
        setattr(file, name, counted(name, getattr(file, name)))
        for module in model.modules():
            module.__class__ = vars(file).get(type(module).__name__, type(module))
            if name == "qk_norm_rope" and hasattr(module, "processor"):
                module.processor = file.FluxAttnProcessor()
    torch.testing.assert_close(model(**given).sample, theirs, rtol=1e-5, atol=1e-5)
assert calls == {"ada_layer_norm": 4, "qk_norm_rope": 4, "gated_residual": 5}, calls
"""


@pytest.mark.slow
def test_flux_gives_the_same_with_fork_files(tmp_path: Path) -> None:
    """A small model of real diffusers, in Triton's interpreter: blocks, norms and attention processors."""
    version, module = compare.versions("diffusers")[-1], "diffusers.models.transformers.transformer_flux"
    for op, kernel in (("gated_residual", ""), ("ada_layer_norm", ""), ("attention_dense", "qk_norm_rope")):
        text = export(op, "diffusers", version, only=module if kernel else "")
        (tmp_path / f"pasted_{kernel or op}.py").write_text(text)
        assert "_attention_dense_kernel" not in text
        classes = len(re.findall(r"^class \w+\(Host", text, re.MULTILINE))
        most = MOST + CLASS * max(classes - 1, 0)  # as in _check_lines
        assert text[text.index("from __future__") :].count("\n") - kernel_lines(ast.parse(text)) <= most
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", FLUX, tmp_path], env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_printed_file_is_of_the_first_module() -> None:
    version = compare.versions("vllm")[-1]
    text = exported("quantize_fp8", "vllm", version)
    assert "\ndef scaled_fp8_quant(" in text and "\ndef per_token_group_quant_fp8(" not in text
    assert text == export("quantize_fp8", "vllm", version, only="vllm._custom_ops")


QUANTIZED = """
import sys, types
import torch
folder, module = sys.argv[1:]
parts, left = module.split("."), []
for i in range(len(parts)):
    sys.modules[".".join(parts[: i + 1])] = types.ModuleType(parts[i])
names = ("sglang_per_token_group_quant_fp8", "sglang_per_token_quant_fp8", "per_token_group_quant_fp8")
for name in (*names, "scaled_fp8_quant"):
    setattr(sys.modules[module], name, lambda *args, **options: left.append(args))
sys.path.insert(0, folder)
import pasted
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
group = getattr(pasted, names[0], None) or getattr(pasted, names[2], None)
def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride() and torch.equal(ours.float(), theirs.float())
torch.manual_seed(0)
x = torch.randn(5, 128)
if group is not None:
    fp8 = (torch.float8_e4m3fn,) if group.__name__ == names[2] else ()
    for columns, aligned in ((False, False), (True, False), (True, True)):
        layout = (columns, aligned)
        same(group(x, 32, 1e-10, *fp8, *layout), quantize_fp8(x, None, 32, None, 1e-10, *layout))
    wide = torch.randn(3, 7, 96, dtype=torch.float16)[:, 2:5]
    same(group(wide, 48, 1e-10, *fp8), quantize_fp8(wide, None, 48, None, 1e-10))
    assert not left
    group(x, 48, 1e-10, *fp8), group(wide, 48, 1e-10, *fp8, True), group(x[:0], 32, 1e-10, *fp8)
    assert len(left) == 3
    left.clear()
if hasattr(pasted, names[1]):
    out = torch.empty(5, 128, dtype=torch.float8_e4m3fn)
    found = pasted.sglang_per_token_quant_fp8(x[:, :63], output_q=out[:, :63])
    same([t.contiguous() for t in found], quantize_fp8(x[:, :63], None, -1, None, 0.0))
    assert found[0].data_ptr() == out.data_ptr() and not left
if hasattr(pasted, "scaled_fp8_quant"):
    least = 0.0 if hasattr(pasted, names[1]) else 1 / 512
    same(pasted.scaled_fp8_quant(x, use_per_token_if_dynamic=True), quantize_fp8(x, None, -1, None, least))
    assert not left
    pasted.scaled_fp8_quant(x), pasted.scaled_fp8_quant(x, torch.tensor([0.01]))
    assert len(left) == 2
"""


@pytest.mark.parametrize(
    "host, module",
    [
        ("sglang", "sglang.kernels.ops.quantization.fp8_kernel"),
        ("vllm", "vllm._custom_ops"),
        ("vllm", "vllm.model_executor.layers.quantization.utils.fp8_utils"),
    ],
)
def test_fork_quantizes_tokens_and_groups(host: str, module: str, tmp_path: Path) -> None:
    """In Triton's interpreter; scales of tensors, and other sizes and layouts, are left to the host."""
    text = export("quantize_fp8", host, compare.versions(host)[-1], only=module)
    (tmp_path / "pasted.py").write_text(text)
    env = {**os.environ, "TRITON_INTERPRET": "1", "FASTKERNELS_PROVIDER": "quantize_fp8:triton"}
    done = warm.run(["-c", QUANTIZED, tmp_path, module], env)
    assert done.returncode == 0, done.stderr[-3000:]


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


@pytest.mark.parametrize(
    "interpreted",
    [pytest.param("0", marks=pytest.mark.slow, id="unsupported"), pytest.param("1", id="interpreted")],
)
def test_functional_fork_files_run_kernels_or_raise(interpreted: str, tmp_path: Path) -> None:
    inputs = {}
    for name in registry.op_names():
        spec = registry.get(name)
        if not spec.targets and name not in NO_PLACE:
            (tmp_path / f"{name}.py").write_text(exported(name, "vllm", "0.33.0"))
            odd = [c for c in spec.cases if "odd" in c.tags]
            # Triton's interpreter computes tl.dot of bfloat16 on its bits as integers.
            case = next((c for c in reversed(odd) if c.dtype != "bfloat16"), odd[-1])
            inputs[name] = spec.inputs(case, "cpu", torch.Generator().manual_seed(3))
    torch.save(inputs, tmp_path / "inputs.pt")
    done = warm.run(["-c", CALL, tmp_path], {**os.environ, "TRITON_INTERPRET": interpreted}, cwd="/")
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


# The file of an op without a class or function in any host is the same for all of them: here that of vLLM.
FUNCTIONS = [name for name in registry.op_names() if not registry.get(name).targets]
CASES = [
    (name, host, version)
    for name in registry.op_names()
    for host, version in VERSIONS
    if (name not in FUNCTIONS or host == "vllm") and _targets(registry.get(name), host, version) is not None
]
FORKS = [case for case in CASES if _fork_targets(registry.get(case[0]), *case[1:]) is not None]
# The other cases differ from one of these in the header alone.
DISTINCT = [case for case in CASES if _alike(*case, True) == case[2]]
DISTINCT_FORKS = [case for case in FORKS if _alike(*case) == case[2]]


def _newest(cases: list[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Those of the newest version of a host that an op is for."""
    return set({case[:2]: case for case in cases}.values())  # versions are in order


def _params(cases: list[tuple[str, str, str]], *standalone: bool) -> list[Any]:
    fast = {c for c in _newest(cases) if not any(standalone) or c[1] in STANDALONE}
    return [pytest.param(*c, *standalone, marks=[] if c in fast else [pytest.mark.slow]) for c in cases]


@pytest.mark.parametrize(
    "name, host, version, standalone", _params(DISTINCT_FORKS, False) + _params(DISTINCT, True), ids=str
)
def test_file_imports_only_torch_triton_and_host(
    name: str, host: str, version: str, standalone: bool
) -> None:
    """At the top level: torch, triton, the standard library; the classes to replace are imported from the host."""
    text = exported(name, host, version, standalone)
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


# lines of a file for a fork without its kernels and header, and more for each further op, class of the host and launch
MOST, OP, CLASS, LAUNCH = 165, 50, 13, 21
# more for the activations and layers that timm's CNNs may have, which these files recognize; convolutions choose tiles
# by the number of pixels, and their precision by PyTorch's setting; memory formats are those of PyTorch, also with gaps
CNN = {"batch_norm": 30, "squeeze_excite": 24, "conv_norm_act": 190}
# more for batches as packed sequences, and for calls of kernels by chunks or token by token
_RULES = ("ssd", "gated_delta_rule", "gated_linear_attention", "kda", "rwkv7")
JAGGED = {
    "embedding_bag": 80,
    "graph_propagate": 15,
}  # inputs of torchrec and torch_geometric, and separate tables
# more for the layouts, masks and flags of openfold3's modules
OPENFOLD = {"attention_pair_bias": 137, "conditioned_layer_norm": 80, "outer_product_mean": 100}
TWO_OPS = {"patch_merger": 60}  # a product with GELU, and GELU behind layers whose own product has to run
RECURRENT = {"causal_conv1d": 90, "mamba_scan": 95, **dict.fromkeys(_RULES, 200), "kda": 210}


def _check_lines(name: str, text: str) -> None:
    text = text.replace(
        " = register(\n", " = guarded(\n"
    )  # an op with another provider for calls without a kernel
    lines, kernels = text[text.index("from __future__") :].count("\n"), kernel_lines(ast.parse(text))
    ops, classes = text.count(" = guarded(\n"), len(re.findall(r"^class \w+\(Host", text, re.MULTILINE))
    launches = text.count("    launch_kernel(")
    most = (
        MOST
        + CNN.get(name, 0)
        + RECURRENT.get(name, 0)
        + JAGGED.get(name, 0)
        + OPENFOLD.get(name, 0)
        + TWO_OPS.get(name, 0)
        + OP * max(ops - 1, 0)
        + CLASS * max(classes - 1, 0)
        + LAUNCH * max(launches - 1, 0)
    )
    assert (lines if name in SHORT else lines - kernels) <= (250 if name in SHORT else most)
    assert kernels > 15 or name not in SHORT
    python = [  # but a name of the host's module in the ops' namespace may be long
        re.sub(r"torch\.ops\.\w+", "torch.ops", line) for line in text.split("\n")
        if re.match(r" *(return|\w+ = guarded|\w+ = register)\b", line)
    ]  # fmt: skip
    assert max(map(len, python), default=0) <= 120


@pytest.mark.parametrize("name", registry.op_names())
def test_fork_files_are_kernels_and_few_lines(name: str) -> None:
    for host in compare.hosts() if registry.get(name).targets else ["vllm"]:
        version = compare.versions(host)[-1]
        if _fork_targets(registry.get(name), host, version) is not None:
            _check_lines(name, exported(name, host, version))


@pytest.mark.slow
@pytest.mark.parametrize("name, host", sorted({case[:2] for case in FORKS}), ids=str)
def test_files_of_further_modules_are_few_lines(name: str, host: str) -> None:
    """Files of `--module` that differ; of transformers, whose models repeat classes, those of 15 modules."""
    checked = []
    for version in (v for n, h, v in reversed(FORKS) if (n, h) == (name, host)):
        found: dict[str, list[Target]] = {}
        for t in fork_targets(registry.get(name), host, version):
            found.setdefault(t.path.partition(":")[0], []).append(t)
        for module in list(found)[1:15]:
            if found[module] not in checked:
                checked.append(found[module])
                _check_lines(name, export(name, host, version, only=module))


@pytest.mark.parametrize(
    "name, standalone",
    [
        pytest.param(name, alone, marks=[] if name == "softplus" else [pytest.mark.slow])
        for name in FUNCTIONS for alone in (False, True) if alone or name not in NO_PLACE
    ],
)  # fmt: skip
def test_file_of_a_function_is_the_same_for_all_hosts(name: str, standalone: bool) -> None:
    """Up to line breaks: of softplus in all hosts, of the others in vLLM and one more host."""
    hosts = compare.hosts()
    others = [host for host in hosts if host != "vllm"]
    codes = set()
    for host in hosts if name == "softplus" else ("vllm", others[FUNCTIONS.index(name) % len(others)]):
        version = compare.versions(host)[-1]
        text = exported(name, host, version, standalone)
        text = text.replace(f"for {host} {version}", "for HOST").replace(f"{name}_{host}", f"{name}_HOST")
        codes.add(ast.dump(ast.parse(text)))
    assert len(codes) == 1


def test_only_modules_of_host_classes_have_texts_of_a_host() -> None:
    """So the file of a function, which has no such module, is the same for all hosts."""
    assert not any("{" in file for file in source.FORK.values())
    assert "" not in OWN and not {op for op, _ in INSTEAD} & {*FUNCTIONS}


@pytest.mark.parametrize("name", sorted(NO_PLACE))
def test_experts_without_a_host_function_have_no_fork_file(name: str) -> None:
    version = compare.versions("vllm")[-1]
    with pytest.raises(ExportError, match=f"{name} has no file for a fork: .*--standalone"):
        export(name, "vllm", version)
    assert f"\n{name} = register(" in exported(name, "vllm", version, standalone=True)


def test_fork_file_has_one_function_of_a_name() -> None:
    """Two functions of ours stand for apply_rotary_pos_emb of different models: each file has its own."""
    path, version = "transformers.models.{0}.modeling_{0}", compare.versions("transformers")[-1]
    printed = exported("rotary_emb", "transformers", version)
    llama, olmo = (
        export("rotary_emb", "transformers", version, only=path.format(model)) for model in ("llama", "olmo2")
    )
    for text in (printed, llama, olmo):
        assert text.count("\ndef apply_rotary_pos_emb(") == 1
    compared = "promote_types(q.dtype, cos.dtype) == q.dtype"
    assert "promote_types(q.dtype, cos.dtype)  #" in llama and compared in olmo and compared not in llama


def test_fork_file_replaces_methods_of_the_host_class(tmp_path: Path) -> None:
    """In real transformers, without this package: the class is the host's with our forward."""
    (tmp_path / "pasted.py").write_text(exported("rms_norm", "transformers", "5.24.0"))
    code = """
import os, sys, torch
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
    if os.environ["TRITON_INTERPRET"] == "1":  # else the host's code runs
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), theirs(x))
print("same")
"""
    for interpreted in ("0", "1"):
        done = warm.run(["-c", code, tmp_path], {**os.environ, "TRITON_INTERPRET": interpreted})
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
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=132)
torch.cuda.is_current_stream_capturing = lambda: False
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
    [
        ("linear", ("-DROWS=128", "-DAHEAD=2", "-DSPLITS=1")),
        pytest.param("attention_decode", ("-DKEYS=16",), marks=pytest.mark.slow),
    ],
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


@pytest.fixture
def linear_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file for a fork of vLLM, over a stand-in for the host's class."""
    path = next(t.path for t in registry.get("linear").targets_for("vllm", "0.33.0"))
    runner.host_module(path.partition(":")[0]).UnquantizedLinearMethod = type("Method", (), {})
    for module in [m for m in sys.modules if m.partition(".")[0] == "vllm"]:
        monkeypatch.setitem(sys.modules, module, sys.modules.pop(module))  # gone after the test
    text = exported("linear", "vllm", "0.33.0").replace("fastkernels_linear", f"test_{tmp_path.name}")
    (tmp_path / "linear.py").write_text(text)
    return runner.load(tmp_path / "linear.py")


def test_linear_tiles_of_a_fork_are_the_library_s(linear_file: Any) -> None:
    for m, n, k, sms in itertools.product(
        (1, 9, 33, 64), (8, 200, 4096, 28672), (64, 896, 4096, 14336), (132, 78)
    ):
        plan = wgmma_linear_cuda.plan(m, n, k, splits=1, stages=4, rows=128, ahead=64, sms=sms)
        found = linear_file.tile(m, n, k, sms)
        assert found == (plan.rows, plan.tokens, plan.block_k, plan.stages, plan.ahead), (m, n, k, sms)
        assert plan.grid == min(-(-n // found[0]), sms)


def test_decode_constants_of_a_fork_are_the_library_s(tmp_path: Path) -> None:
    text = exported("attention_decode", "vllm", "0.33.0")
    (tmp_path / "decode.py").write_text(text.replace("fastkernels_attention_decode", f"test_{tmp_path.name}"))
    file = runner.load(tmp_path / "decode.py")
    dtypes = (torch.bfloat16, torch.float16)
    for batch, group, size, window, dtype in itertools.product(
        (1, 300), (1, 4, 16), (64, 80, 128, 256), (0, 1), dtypes
    ):
        q, cache = torch.empty(batch, 2 * group, size, dtype=dtype), torch.empty(3, 16, 2, size, dtype=dtype)
        params = attention_decode_cuda.PARAMS[5 if size > 128 else 0]
        plan = attention_decode_cuda.plan(params, q, cache, bool(window), not window)
        found, shared = file.constants(q, cache, bool(window), not window)
        assert shared == plan.shared and params["per_sm"] * params["cluster"] == 1
        assert {f"-D{name}={value}" for name, value in found.items()} == set(plan.options) - {"--std=c++17"}
        assert params["least"] // params["keys"] == 8


@pytest.mark.skipif(cuda_rtc.unavailable() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("overlap", [False, True])
def test_launch_of_a_fork_gives_the_driver_its_structures(
    overlap: bool, linear_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUlaunchConfig, its attribute and the parameters, in memory as cuda-bindings has them."""
    from cuda.bindings import driver

    told: list[Any] = []

    def launched(config: bytes, function: Any, pointers: Any, extra: None) -> int:
        attributes = int.from_bytes(config[40:48], "little")
        told.extend([config, ctypes.string_at(attributes, 72), ctypes.c_int.from_address(pointers[1]).value])
        return 0

    monkeypatch.setattr(linear_file.ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchKernelEx=launched))
    kernel = linear_file.Kernel.__new__(linear_file.Kernel)
    kernel.types, kernel.shared, kernel.function = (ctypes.c_void_p, ctypes.c_int), 4321, ctypes.c_void_p(99)
    kernel.launch(7, 192, 0x1234567890, [None, 41], overlap)
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = 7, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 192, 1, 1
    config.sharedMemBytes, config.hStream, config.numAttrs = 4321, 0x1234567890, int(overlap)
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    expected = ctypes.string_at(config.getPtr(), 56)
    assert told[0][:40] + told[0][48:52] == expected[:40] + expected[48:52]
    assert told[1][:12] == ctypes.string_at(attribute.getPtr(), 72)[:12] and told[2] == 41


FP8_HOSTS = [("vllm", "cutlass_scaled_mm"), ("sglang", "fp8_scaled_mm")]


@pytest.fixture
def fp8_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(the host's function in the file for a fork, the file), over a stand-in that returns its arguments."""
    host, name = request.param
    product = SimpleNamespace(args=())

    def stand_in(*args: Any) -> Any:
        product.args = args
        return torch.zeros(len(args[0]), args[1].shape[1], dtype=args[4])

    path = INSTEAD["linear_fp8", host].path
    setattr(runner.host_module(path.partition(":")[0]), name, stand_in)
    for module in [m for m in sys.modules if m.partition(".")[0] == host]:
        monkeypatch.setitem(sys.modules, module, sys.modules.pop(module))  # gone after the test
    text = exported("linear_fp8", host, compare.versions(host)[-1])
    (tmp_path / "fp8.py").write_text(text.replace("fastkernels_linear_fp8", f"test_{tmp_path.name}"))
    file = runner.load(tmp_path / "fp8.py")
    return getattr(file, name), file, product


@pytest.mark.parametrize("fp8_file", FP8_HOSTS, indirect=True, ids=lambda pair: pair[0])
def test_fp8_calls_without_a_kernel_run_the_host(fp8_file: Any) -> None:
    """With the arguments that they were given."""
    function, _, host = fp8_file
    x, w = (torch.zeros(n, 256).to(torch.float8_e4m3fn) for n in (5, 384))
    of_x, bias = torch.rand(5, 1), torch.zeros(384).half()
    for of_w in (torch.rand(1), torch.rand(384, 1), torch.rand(3, 2).t()):
        out = function(x, w.t(), of_x, of_w, torch.float16, bias)
        assert out.shape == (5, 384) and host.args[4] == torch.float16
        for given, found in zip((x, w.t(), of_x, of_w, None, bias), host.args, strict=True):
            assert given is None or (given.data_ptr(), given.stride()) == (found.data_ptr(), found.stride())


class OnCuda(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    is_cuda = True


def _fp8_call(m: int = 5, n: int = 384, k: int = 256, of_x: tuple = (1,), of_w: tuple = (1,)) -> list[Any]:
    x, w = torch.zeros(m, k).to(torch.float8_e4m3fn), torch.zeros(n, k).to(torch.float8_e4m3fn)
    return [x.as_subclass(OnCuda), w.t(), torch.rand(of_x), torch.rand(of_w), torch.bfloat16, None]


@pytest.mark.parametrize("fp8_file", FP8_HOSTS[:1], indirect=True, ids=lambda pair: pair[0])
def test_fp8_kernel_of_a_fork_gets_the_library_s_arguments(
    fp8_file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file, _ = fp8_file
    launched: list[Any] = []
    kernel = SimpleNamespace(launch=lambda *args: launched.append(args))
    monkeypatch.setattr(file, "wgmma_kernel", lambda device, *how: launched.append(how) or kernel)
    monkeypatch.setattr(file, "tensor_map", lambda *what: what)
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for of_x, of_w in (((1,), (1,)), ((5, 1), (384, 1)), ((5, 1), (1, 384)), ((5, 1), (1,))):
        launched.clear()
        a, b, scale_a, scale_b, dtype, _ = call = _fp8_call(of_x=of_x, of_w=of_w)
        out = file.product(*call)
        plan = wgmma_linear_fp8_cuda.plan(5, 384, 256, splits=1, stages=4, rows=128, ahead=64)
        tile = (plan.rows, plan.tokens, plan.block_k, plan.stages, plan.ahead)
        rows, at = linear_fp8_scales.strides(linear_fp8_scales.ROW, scale_a, scale_b.reshape(-1))
        scales = wgmma_linear_fp8_cuda.Scales(rows.data_ptr(), scale_b.data_ptr(), *at)
        (how, (grid, threads, stream, args, early)) = launched
        assert how == (tile, True) and (grid, threads, stream, early) == (plan.grid, 192, 77, True)
        assert args[0] == (a.data_ptr(), 5, 128, 128, plan.tokens)
        assert args[1] == (b.data_ptr(), 384, 128, 128, plan.rows)
        assert args[2:9] == [None, out.data_ptr(), None, None, 5, 384, 128]
        assert args[9].raw == bytes(scales) and out.shape == (5, 384) and out.dtype == dtype


@pytest.mark.parametrize("fp8_file", FP8_HOSTS[:1], indirect=True, ids=lambda pair: pair[0])
def test_fp8_calls_that_the_kernel_of_a_fork_supports(fp8_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file, _ = fp8_file
    monkeypatch.setattr(file, "nvrtc", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    a, b, scale_a, scale_b, dtype, _ = _fp8_call(of_x=(5, 1), of_w=(1, 384))
    assert file.fits(a, b, scale_a, scale_b, dtype) and file.fits(a, b, scale_a[:1], scale_b[:, :1], dtype)
    assert file.fits(a, b, scale_a, scale_b, torch.float16, torch.zeros(384).half())
    assert not file.fits(a, b, scale_a, scale_b, dtype, torch.zeros(384).half())
    assert not file.fits(a, b, torch.rand(5, 2), torch.rand(2, 3), dtype)  # per block
    assert not file.fits(a, b, scale_a.double(), scale_b, dtype)
    assert not file.fits(a[None], b, scale_a, scale_b, dtype)
    assert not file.fits(a, b.contiguous(), scale_a, scale_b, dtype)
    for sizes in ({"m": 65}, {"k": 112}, {"k": 264}):
        assert not file.fits(*_fp8_call(**sizes)), sizes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not file.fits(a, b, scale_a, scale_b, dtype)


@pytest.mark.parametrize("fp8_file", FP8_HOSTS[:1], indirect=True, ids=lambda pair: pair[0])
def test_fp8_tiles_of_a_fork_are_the_library_s(fp8_file: Any) -> None:
    for m, n, k in itertools.product((1, 17, 64), (8, 4096, 28672), (128, 4096, 14336)):
        plan = wgmma_linear_fp8_cuda.plan(m, n, k, splits=1, stages=4, rows=128, ahead=64)
        found = fp8_file[1].tile(m, n, k // 2, 132)
        assert found == (plan.rows, plan.tokens, plan.block_k, plan.stages, plan.ahead), (m, n, k)


ONE_EACH = sorted({c[0]: c for c in CASES}.values())  # a case of each op


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if i % 6 else []) for i, c in enumerate(ONE_EACH)],
    ids=[c[0] for c in ONE_EACH],
)
def test_second_export_gives_the_same_text(case: tuple[str, str, str]) -> None:
    for standalone in (False, True) if case in FORKS else (True,):
        assert exported(*case, standalone) == export(*case, standalone)


SAME = sorted(
    {c[:2]: (*c, s) for s in (False, True) for c in (CASES if s else FORKS) if _alike(*c, s) != c[2]}.values()
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if i % 24 == 0 else [pytest.mark.slow]) for i, c in enumerate(SAME)], ids=str
)  # fmt: skip
def test_versions_with_equal_targets_differ_in_the_header(case: tuple[str, str, str, bool]) -> None:
    """One version of each op and host."""
    assert exported(*case) == export(*case)


@pytest.mark.parametrize("name, host, version", _params(DISTINCT_FORKS), ids=str)
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


@pytest.mark.parametrize(
    "version, cases",
    [
        pytest.param("3.10", _newest(FORKS), id="3.10"),
        pytest.param("3.10", DISTINCT_FORKS, id="3.10-all", marks=pytest.mark.slow),
        pytest.param("3.13", DISTINCT_FORKS, id="3.13-all", marks=pytest.mark.slow),
    ],
)
def test_exported_files_parse_under(
    version: str, cases: Collection[tuple[str, str, str]], tmp_path: Path
) -> None:
    python = _python(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    for name, host, host_version in cases:
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
    done = warm.run(["-c", code, tmp_path])
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
    done = warm.run(["-c", SUBCLASSES, tmp_path])
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
    done = warm.run(["-c", PACKED, tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]


def test_attribute_that_a_fork_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (target,) = registry.get("rms_norm_gated").targets_for("sglang", "0.5.23")[:1]
    ours = registry.target_class(target)
    monkeypatch.setattr(ours, "live_methods", ("forward",), raising=False)
    monkeypatch.setattr(ours, "group_size", None, raising=False)
    with pytest.raises(ExportError, match=r"reads self.group_size of"):
        export("rms_norm_gated", "sglang", "0.5.23")


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
