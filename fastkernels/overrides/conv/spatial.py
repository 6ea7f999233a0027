"""Shared by ops on [B, C, ...] with one to three spatial dimensions: settings of each, views with all three."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastkernels.overrides.kit.rows import FLOATS

DIMENSIONS = 3  # at most


def spatial(name: str, x: torch.Tensor) -> int:
    """The number of spatial dimensions of x [B, C, ...]. Raises ValueError."""
    if not 3 <= x.dim() <= 2 + DIMENSIONS:
        raise ValueError(
            f"{name}: x must be [B, C, ...] with one to three sizes after C, got {tuple(x.shape)}"
        )
    return x.dim() - 2


def each(name: str, setting: str, values: Sequence[int], n: int, least: int = 0) -> list[int]:
    """A setting of n dimensions; one number stands for all. Raises ValueError."""
    found = [int(v) for v in values] * (n if len(values) == 1 else 1)
    if len(found) != n or min(found) < least:
        raise ValueError(f"{name}: {setting} must be 1 or {n} numbers, at least {least}, got {list(values)}")
    return found


def lifted(x: torch.Tensor) -> torch.Tensor:
    """x [B, C, ...] as [B, C, D, H, W], a view."""
    while x.dim() < 2 + DIMENSIONS:
        x = x.unsqueeze(2)
    return x


def padded(values: Sequence[int], value: int) -> list[int]:
    """The settings of three dimensions: `value` for those in front that a tensor lacks."""
    return [*[value] * (DIMENSIONS - len(values)), *values]


def channels_last(x: torch.Tensor) -> bool:
    """Whether x [B, C, H, W] has its channels last in memory, as PyTorch's convolutions see it: also with gaps.

    A part of the channels of such images has gaps. False where the order of the sizes could be the usual one.
    """
    if x.dim() != 4 or x.is_contiguous():
        return False
    least = 0
    for d in (1, 3, 2, 0):
        size, stride = x.shape[d], x.stride(d)
        if size == 0 or stride < max(least, 1) or (d == 0 and least == x.stride(1)):
            return False
        least = stride * size
    return True


def unsupported(x: torch.Tensor) -> str | None:
    """None if the kernels can read x, else the reason."""
    return None if x.dtype in FLOATS else f"x has dtype {x.dtype}, not float16, bfloat16 or float32"
