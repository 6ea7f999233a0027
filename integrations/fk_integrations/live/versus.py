"""Two callables against each other: whether they compute the same, and the time of calls one after the other."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastkernels.core.dispatch import OPS

ERRORS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the norm of the result
CALLS = 4  # of a graph, or one after the other
MEASURING: list[Any] = []  # modules that decide now: what they run is no proof


@contextmanager
def measuring(module: Any) -> Iterator[None]:
    """Let a module run for a measurement, which counts as no call."""
    counted = [(op, op.calls, op.owned, op.plain, op.fallbacks, op.left) for op in OPS.values()]
    MEASURING.append(module)
    try:
        yield
    finally:
        MEASURING.pop()
        for op, calls, owned, plain, fallbacks, left in counted:
            op.calls, op.owned, op.plain, op.fallbacks, op.left = calls, owned, plain, fallbacks, left


def different(got: Any, want: Any) -> str | None:
    """Why our result is not the host's, or None."""
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"our result is a {type(got).__name__}"
        return next((why for a, b in zip(got, want, strict=True) if (why := different(a, b))), None)
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and got == want
        return None if same else f"our result is {_shown(got)}, the host's {_shown(want)}"
    if not isinstance(got, torch.Tensor):
        return f"our result is {_shown(got)}, the host's {_shown(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"our result is {tuple(got.shape)} {got.dtype}, the host's {tuple(want.shape)} {want.dtype}"
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))
    return None if error <= ERRORS.get(want.dtype, 1e-4) else f"our result differs by {error:.2g} of its norm"


def _shown(value: Any) -> str:
    """A value for a message: a tensor by its shape and dtype, all else in at most 80 characters."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return reprlib.repr(value)[:80] if _plain(value) else f"a {type(value).__name__}"


def _plain(value: Any) -> bool:
    """Whether a value prints no tensor."""
    return isinstance(value, (int, float, complex, str, bytes, bool, type(None)))


def one_by_one(
    subjects: list[Callable[[], Any]], device: torch.device, rounds: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of CALLS calls one after the other, by subject and round: until they end, and until the last returns."""
    times: list[list[float]] = [[] for _ in subjects]
    issued: list[list[float]] = [[] for _ in subjects]
    for i in range(rounds):
        for j in range(len(subjects)):
            which = (i + j) % len(subjects)
            _wait(device)
            began = time.perf_counter()
            for _ in range(CALLS):
                subjects[which]()
            issued[which].append(time.perf_counter() - began)
            _wait(device)
            times[which].append(time.perf_counter() - began)
    return times, issued


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
