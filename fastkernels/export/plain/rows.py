"""Rows of a tensor [..., H] with at most two strides above the last dimension."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner rows, outer stride, inner stride), or None: three dimensions, or any that are contiguous."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x.shape[1], x.stride(0), x.stride(1)
    whole = x.dim() == 2 and x.stride(-1) == 1
    return (1, x.stride(-2) if x.dim() > 1 else 0, 0) if whole or x.is_contiguous() else None


def tokens_first(x: torch.Tensor) -> bool:
    """Whether x [B, heads, T, D] has the heads of a token together in memory."""
    return x.dim() == 4 and x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2)


def unsupported_rows(x: torch.Tensor | None, name: str = "x") -> str | None:
    fits = x is None or (x.dtype in FLOATS and rows(x) is not None)
    return None if fits else f"{name}: unsupported dtype or strides"


def unsupported_vector(x: torch.Tensor | None, name: str = "x") -> str | None:
    fits = x is None or (x.dtype in FLOATS and x.is_contiguous())
    return None if fits else f"{name}: unsupported dtype or strides"
