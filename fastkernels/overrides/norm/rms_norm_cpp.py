"""rms_norm on the CPU in C++: csrc/rms_norm.cpp, compiled once by the machine's compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fastkernels.overrides.kit import cpp
from fastkernels.overrides.kit.rows import rows

SOURCE = Path(__file__).parent / "csrc" / "rms_norm.cpp"
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Call(ctypes.Structure):
    """Call of the source."""

    _fields_ = [
        *((name, _P) for name in ("x", "weight", "residual", "out")),
        *((name, _I) for name in ("rows", "inner", "hidden", "var_hidden")),
        *((name, _I) for name in ("x_0", "x_1", "residual_0", "residual_1")),
        ("eps", ctypes.c_float),
        ("cast_first", ctypes.c_int32),
    ]


def missing() -> str | None:
    """Return why the kernel cannot run on this machine; None if it can. Compiles it."""
    found = cpp.library(SOURCE)
    return found if isinstance(found, str) else None


@cache
def _kernel() -> Callable[..., None]:
    types = (ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_int)
    return cpp.function(cpp.library(SOURCE), "rms_norm", *types)


def normalize(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None,
    var_hidden_size: int | None, cast_x_before_out_mul: bool,
) -> torch.Tensor | None:  # fmt: skip
    """The op's result, or None for a call that the kernel does not support."""
    hidden = x.shape[-1]
    if x.dtype not in cpp.DTYPES or x.numel() == 0:
        return None
    at, residual_at = rows(x), (1, 0, 0) if residual is None else rows(residual)
    if at is None or residual_at is None:
        return None
    inner, *strides = at
    if residual is not None and (
        residual.dtype != x.dtype or residual.shape != x.shape or residual_at[0] != inner
    ):
        return None
    if weight is not None and (
        weight.shape != (hidden,)
        or not weight.is_contiguous()
        or weight.dtype not in (x.dtype, torch.float32)
    ):
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    call = _Call(
        x.data_ptr(), None if weight is None else weight.data_ptr(),
        None if residual is None else residual.data_ptr(), out.data_ptr(), out.numel() // hidden, inner, hidden,
        hidden if var_hidden_size is None else var_hidden_size, *strides, *residual_at[1:], eps, cast_x_before_out_mul,
    )  # fmt: skip
    _kernel()(call, cpp.DTYPES[x.dtype], weight is None or weight.dtype == x.dtype)
    return out
