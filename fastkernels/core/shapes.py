"""Sizes of an op's calls, for SPEC: those of real arguments (dims_of), and others that are like a case's (vary)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastkernels.core.case import Case

SMALL = 1 << 20  # bytes that any call may move, however little its case does


def optional(**dims: Any) -> dict[str, Any]:
    """The dims that are neither None nor False."""
    return {name: value for name, value in dims.items() if value is not None and value is not False}


def unless(value: Any, usual: Any) -> Any:
    """The value, None if it is the usual one: for `optional`."""
    return None if value == usual else value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(x: torch.Tensor, inner: str = "heads") -> dict[str, Any]:
    """tokens, and for more than two dimensions `inner`, of x [..., H] as [tokens, inner, H]."""
    if x.dim() <= 2:
        return {"tokens": x.shape[0] if x.dim() == 2 else 1}
    return {"tokens": x.shape[:-2].numel(), inner: x.shape[-2]}


def near(n: int, rng: random.Random) -> int:
    """Draw a count from n/2 to 5n/4 (1 to 11 for a small n), half of the time an odd one."""
    found = rng.randint(1, 11) if n <= 8 else rng.randint(-(-n // 2), n * 5 // 4)
    return found | 1 if rng.random() < 0.5 else found


def near_size(n: int, rng: random.Random) -> int:
    """Draw another width of about n that keeps its alignment: a multiple of 64 (8, 2) gives one of 64 (8, 2)."""
    step = next(s for s in (64, 8, 2, 1) if n % s == 0)
    return max(rng.randint(-(-n // 2), max(n * 5 // 4, 7)) // step, 1) * step


def drawn(
    case: Case, rng: random.Random, counts: Sequence[str] = (), widths: Sequence[str] = ()
) -> dict[str, Any]:
    """Others for those of the case's dims that are there, numbers or tuples of them: `near` and `near_size`."""
    names = [(n, near) for n in counts if n in case.dims] + [(n, near_size) for n in widths if n in case.dims]
    return {name: _other(case.dims[name], rng, pick) for name, pick in names}


def _other(value: Any, rng: random.Random, pick: Callable[[int, random.Random], int]) -> Any:
    return tuple(pick(n, rng) for n in value) if isinstance(value, (tuple, list)) else pick(value, rng)


def varied(
    case: Case,
    draw: Callable[[], Mapping[str, Any]],
    bytes_moved: Callable[[Case], int],
    flops: Callable[[Case], int],
) -> Case:
    """The case with the dims that draw() gives (None: without that one), the first that costs at most twice as much, or
    next to nothing. The name says the new sizes. The case's own dims stay where no draw is cheap enough.
    """
    # 100 operations a byte: with fewer, memory decides.
    most = max(2 * bytes_moved(case), SMALL), max(2 * flops(case), 100 * SMALL)
    for _ in range(64):
        new = dict(draw())
        dims = {name: value for name, value in {**case.dims, **new}.items() if value is not None}
        made = dataclasses.replace(case, name=_name(case.name, new), dims=dims, tags=("held-out",))
        if dims != case.dims and bytes_moved(made) <= most[0] and flops(made) <= most[1]:
            return made
    return dataclasses.replace(case, tags=("held-out",))


def _name(old: str, dims: Mapping[str, Any]) -> str:
    sizes = {n: v for n, v in dims.items() if v is not None and not isinstance(v, (bool, str, float))}
    return "-".join([old, *(f"{name}{_size(value)}" for name, value in sizes.items())])


def _size(value: Any) -> str:
    if not isinstance(value, (list, tuple)):
        return str(value)
    return "x".join(map(str, value)) if len(value) <= 3 else f"{len(value)}x{max(value)}"
