"""Tests of launch_kernel: it finds the same compiled kernel as Triton. Kernels are compiled for an H200, none runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.kernel_variants import FakeDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastkernels.overrides.kit import overlap
from fastkernels.overrides.kit.overlap import follow, launch_kernel

if not isinstance(follow, JITFunction):
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)


@triton.jit
def _kernel(
    x_ptr, y_ptr, n, stride, factor, flag, ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    follow(OVERLAP)
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if ADD:
        x += tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(x_ptr + at, x * factor, mask=at < n)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(overlap, "_quick", True)
    monkeypatch.setattr(overlap, "_compiled", {})
    monkeypatch.setattr(overlap, "overlaps", lambda device: True)
    _kernel.device_caches.clear()
    yield fake
    _kernel.device_caches.clear()


X, Y = torch.zeros(64), torch.zeros(64)
BASE: dict[str, Any] = {"x": X, "y": Y, "n": 64, "stride": 16, "factor": 2.0, "flag": 7}
OTHERS: list[dict[str, Any]] = [
    {"n": 48},  # as divisible by 16 as 64
    {"n": 63}, {"n": 1}, {"stride": 1}, {"n": 1 << 32}, {"n": -16}, {"n": 0}, {"flag": True}, {"flag": 2.0},
    {"factor": 3.0}, {"y": None}, {"x": X[1:]}, {"x": X[4:]}, {"x": X.half()}, {"y": Y.double()},
]  # fmt: skip


def launch(grid: tuple[int, ...] = (3, 2), **change: Any) -> None:
    args = {**BASE, **change}
    constants = {
        "ADD": args["y"] is not None,
        "BLOCK": args.pop("block", 64),
        "num_warps": args.pop("num_warps", 4),
    }
    launch_kernel(_kernel, grid, *args.values(), **constants)


def test_same_kernel_and_arguments_as_triton(chip: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call runs three times: through Triton, for the first time, and from the cache."""
    calls = [{}, *OTHERS, {"block": 32}, {"num_warps": 8}, {"grid": (5000,)}]
    for change in calls:
        monkeypatch.setattr(overlap, "_quick", False)
        launch(**change)
    monkeypatch.setattr(overlap, "_quick", True)
    for _ in range(2):
        for change in calls:
            launch(**change)
    count = len(calls)
    by_triton, first, kept = (chip.launched[i * count : (i + 1) * count] for i in range(3))
    for change, want, *found in zip(calls, by_triton, first, kept, strict=True):
        for args in found:
            # grid, stream, function, packed metadata; then Triton's metadata and hooks, which are unused
            assert args[:6] == want[:6], change
            assert len(args) == len(want), change
            for ours, theirs in zip(args[9:], want[9:], strict=True):
                assert ours is theirs or ours == theirs, change
    functions = {args[4] for args in by_triton}
    assert len(functions) == chip.loaded > 10


def test_second_launch_does_not_call_triton(chip: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch()
    monkeypatch.setattr(JITFunction, "run", None)
    launch()
    launch(n=48, factor=5.0)
    assert len(chip.launched) == 3 and chip.launched[-1][9:13] == (X, Y, 48, 16)
    chip.device = 1  # which has no kernel yet
    with pytest.raises(TypeError):
        launch()


def test_launch_hooks_see_every_launch(chip: FakeDriver) -> None:
    seen: list[Any] = []
    hook = overlap.knobs.runtime.launch_enter_hook
    launch()
    hook.add(seen.append)
    try:
        launch()
        assert chip.launched[-1][7] is hook and chip.launched[-1][6] is not None
    finally:
        hook.remove(seen.append)
    launch()
    assert chip.launched[-1][7] is None


def test_unknown_argument_types_are_left_to_triton(chip: FakeDriver) -> None:
    launch(flag=(1, 2))
    launch(flag=(1, 2))
    assert not overlap._compiled and len(chip.launched) == 2
