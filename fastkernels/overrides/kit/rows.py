"""Address the rows of a strided tensor [..., H] with two strides."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner rows, outer stride, inner stride): row r is at r // inner * outer stride + r % inner * inner stride.

    None if two strides cannot describe it, or a row's elements are not adjacent.
    """
    strides = x.stride()
    if not strides or (strides[-1] != 1 and x.shape[-1] != 1):
        return None
    if len(strides) == 2:
        return 1, strides[0], 0
    if len(strides) == 3:
        return x.shape[1], strides[0], strides[1]
    runs: list[tuple[int, int]] = []  # (size, stride), with contiguous dimensions merged
    for size, stride in zip(x.shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    if len(runs) > 2:
        return None
    (_, outer), (n_inner, inner) = [(1, 0), (1, 0), *runs][-2:]
    return (n_inner, outer, inner) if len(runs) == 2 else (1, inner, 0)


def tokens_first(x: torch.Tensor) -> bool:
    """Whether x [B, heads, T, D] has the heads of a token together in memory, as queries and keys after a product.

    Kernels then take x.transpose(1, 2): three strides describe x itself.
    """
    return x.dim() == 4 and x.shape[1] > 1 and x.shape[2] > 1 and x.stride(1) < x.stride(2)


def unsupported_rows(x: torch.Tensor | None, name: str = "x") -> str | None:
    """None if a kernel that uses `rows` can read x, or x is None, else the reason."""
    if x is None:
        return None
    if x.dtype not in FLOATS:
        return f"{name} has dtype {x.dtype}, not float16, bfloat16 or float32"
    if rows(x) is None:
        return f"{name} of shape {tuple(x.shape)} has strides {tuple(x.stride())}: rows need at most two"
    return None


def unsupported_vector(t: torch.Tensor | None, name: str) -> str | None:
    """None if a kernel can read t, [H] or None, element by element, else the reason."""
    if t is None or (t.is_contiguous() and t.dtype in FLOATS):
        return None
    return f"{name} of dtype {t.dtype} has strides {tuple(t.stride())}: it must be contiguous, of at most 32 bits"
