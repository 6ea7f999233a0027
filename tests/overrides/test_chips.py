"""Kernels on chips that were never measured: Triton's compile for sm_80 and sm_100, CUDA C++ declines by name."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import ahead, alone
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler.errors import CompilationError

from fastkernels.core import cuda_rtc, registry
from fastkernels.overrides.kit import fp8, hopper
from fastkernels.overrides.linear.kernels import linear_fp8_triton

CAPABILITIES = (80, 100)


def capabilities(launch: ahead.Launch) -> tuple[int, ...]:
    """Ampere, which has no float8, for all. Blackwell differs in products: for modules of kernels that have any."""
    source = Path(sys.modules[launch[0].fn.__module__].__file__ or "").read_text()
    return CAPABILITIES if "tl.dot" in source else CAPABILITIES[:1]


QUICK = {"embedding", "gelu", "l2_norm", "layer_norm"}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUICK_ALONE = ("_mask_kernel", "_known_kernel", "_advance_kernel")
TRITON = [  # those that share a function with another provider call ops, and have no kernel of their own
    (op.name, p.name)
    for name in registry.op_names() if (op := registry.get(name).op) is not None
    for p in op.providers if p.name.startswith("triton") and [q.fn for q in op.providers].count(p.fn) == 1
]  # fmt: skip
CUDA = [
    (op.name, p.name)
    for name in registry.op_names() if (op := registry.get(name).op) is not None
    for p in op.providers if "cuda" in p.name
]  # fmt: skip


def provider(op: str, name: str) -> Any:
    return next(p for p in registry.get(op).op.providers if p.name == name)


def cases(op: str) -> list[Any]:
    return [c for c in registry.get(op).cases if "odd" in c.tags]


@cache
def launches(op: str, name: str) -> list[ahead.Launch]:
    """The first launch of each kernel that a small case of the op launches, without float8 if one has none."""
    spec, fn = registry.get(op), provider(op, name).fn
    found: dict[str, ahead.Launch] = {}
    float8: dict[str, ahead.Launch] = {}
    problem: Exception | None = None
    for case in cases(op):
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
        try:
            made = ahead.launched(lambda args=args: fn(*args))  # type: ignore[misc]
        except Exception as error:  # a case that this provider does not support
            problem = error
            continue
        for launch in made:
            small = any(isinstance(a, torch.Tensor) and a.dtype in FLOAT8 for a in launch[1])
            (float8 if small else found).setdefault(ahead.name_of(launch), launch)
    found = float8 | found
    assert found, f"{op}: no small case launches a kernel of {name}: {problem}"
    return list(found.values())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")
@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(*pair, marks=() if pair[0] in QUICK else pytest.mark.slow) for pair in TRITON],
)
def test_triton_kernels_compile_for_unmeasured_chips(
    op: str, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in launches(op, name):
        for capability in capabilities(launch):
            try:
                ahead.compile_for(launch, capability)
            except CompilationError as error:  # float8 on Ampere
                assert capability == 80 and "fp8e4nv not supported" in str(error)
                assert declines(op, name, (8, 0), monkeypatch)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n.endswith(QUICK_ALONE) else pytest.mark.slow) for n in alone.CALLS]
)
def test_kernels_without_a_case_compile_for_unmeasured_chips(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {ahead.name_of(launch): launch for launch in ahead.launched(alone.CALLS[name])}
    for capability in capabilities(found[name]):
        ahead.compile_for(found[name], capability)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_triton_kernel_is_launched_by_a_small_call() -> None:
    launched = {*alone.CALLS}
    for op, name in TRITON:
        launched |= {ahead.name_of(launch) for launch in launches(op, name)}
    missing = {name for name, inner in ahead.kernels().items() if not inner} - launched
    assert not missing, (
        f"no small case of a provider, nor a call of support/kernels/alone.py, launches {missing}"
    )


# Families and ops that were written without a GPU
UNMEASURED = {"geometry", "point", "detection", "recsys", "conv1d_norm_mish", "frame_attention", "norm_pad"}
SHARED = 227 << 10  # bytes of shared memory that a program on a Hopper GPU may have
SPILLED = 64  # bytes of a thread's stack: a few spills, or the slow path of a sine


def written_without_a_gpu(op: str) -> bool:
    family = registry.get(op).reference.__module__.split(".")[-2]
    return bool(UNMEASURED & {op, family})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here")
@pytest.mark.parametrize(("op", "name"), [pair for pair in TRITON if written_without_a_gpu(pair[0])])
def test_triton_kernels_fit_hopper_at_their_largest_case(
    op: str, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models' shapes: neither too much shared memory nor spilled registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec, found = registry.get(op), provider(op, name)
    models = sorted((c for c in spec.cases if "model" in c.tags), key=spec.bytes_moved)
    inputs = [spec.declaration.blank(c) for c in models]
    args = next(a for a in reversed(inputs) if found.supports is None or found.supports(*a) is None)
    kernels = ahead.launched(lambda: found.fn(*args))
    assert kernels
    for launch in kernels:
        compiled = ahead.compile_for(launch, 90)
        usage = ahead.usage(compiled, tmp_path)
        fits = compiled.metadata.shared <= SHARED and usage["STACK"] <= SPILLED
        assert fits, (launch[0].fn.__name__, compiled.metadata.shared, usage)


def _on(device: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def declines(op: str, name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why a provider does not support any case of the op on such a GPU; '' if it supports one."""
    spec, found = registry.get(op), provider(op, name)
    for module in (fp8, linear_fp8_triton):
        monkeypatch.setattr(module, "_capability", lambda device: capability)
    monkeypatch.setattr(cuda_rtc, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_capability", lambda device: capability)
    reasons = []
    for case in spec.cases:
        args = spec.declaration.blank(case)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                reasons.append(found.supports(*(_on("cuda", a) for a in args)))
        except RuntimeError:  # it slices a tensor, which needs PyTorch with CUDA
            reasons.append(found.supports(*(_on("meta", a) for a in args)))
    return "" if None in reasons else next((r for r in reasons if "Hopper" in r), reasons[0])


@pytest.mark.parametrize(("op", "name"), CUDA)
def test_cuda_kernels_decline_other_chips_by_name(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability in ((8, 0), (10, 0)):
        reason = declines(op, name, capability, monkeypatch)
        assert "Hopper" in reason and f"{capability[0]}.{capability[1]}" in reason, reason
