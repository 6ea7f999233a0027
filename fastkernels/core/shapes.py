"""Sizes of an op's calls: dims of real arguments, and other sizes for held-out cases."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastkernels.core.case import Case

SMALL = 1 << 20  # bytes that a held-out case may always move, however small the original case is


def optional(**dims: Any) -> dict[str, Any]:
    """The dims without those that are None or False."""
    return {name: value for name, value in dims.items() if value is not None and value is not False}


def unless(value: Any, default: Any) -> Any:
    """The value, or None if it equals the default; for `optional`."""
    return None if value == default else value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def near(n: int, rng: random.Random) -> int:
    """A random count between n / 2 and 5 n / 4 (1 to 11 for small n), odd at least half of the time."""
    found = rng.randint(1, 11) if n <= 8 else rng.randint(-(-n // 2), n * 5 // 4)
    return found | 1 if rng.random() < 0.5 else found


def near_size(n: int, rng: random.Random) -> int:
    """A random width between n / 2 and 5 n / 4 that keeps divisibility: a multiple of 64 (8, 2) stays one."""
    step = next(s for s in (64, 8, 2, 1) if n % s == 0)
    return max(rng.randint(-(-n // 2), max(n * 5 // 4, 7)) // step, 1) * step


def drawn(
    case: Case, rng: random.Random, counts: Sequence[str] = (), widths: Sequence[str] = ()
) -> dict[str, Any]:
    """Random values for the named dims that the case has, numbers or tuples: `near` counts, `near_size` widths."""
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
    """The case with the first dims of draw() that cost at most twice as much as the case, or next to nothing.

    draw() gives new values; None removes a dim. The name lists the new sizes. If 64 draws are all too expensive, the
    case keeps its dims.
    """
    # Below 100 operations per byte, a call is memory-bound.
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
