"""How a kernel finds the rows of a tensor [..., H] that is not contiguous."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner rows, outer stride, inner stride): row r is at r // inner * outer stride + r % inner * inner stride.

    None if two strides do not say it, or a row's elements are not side by side.
    """
    if x.dim() == 0 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return None
    if x.dim() == 2:
        return 1, x.stride(0), 0
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    runs: list[tuple[int, int]] = []  # (size, stride): dimensions that continue each other are one
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
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


def unsupported_rows(**tensors: torch.Tensor | None) -> str | None:
    """None if kernels that take `rows` can read these tensors, else the reason."""
    for name, t in tensors.items():
        if t is not None and t.dtype not in FLOATS:
            return f"{name} has dtype {t.dtype}, not float16, bfloat16 or float32"
        if t is not None and rows(t) is None:
            return (
                f"{name} of shape {tuple(t.shape)} has strides {tuple(t.stride())}, which are more than two"
            )
    return None
