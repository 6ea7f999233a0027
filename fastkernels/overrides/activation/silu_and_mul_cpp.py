"""silu_and_mul on the CPU in C++: csrc/silu_and_mul.cpp, compiled once by the machine's compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fastkernels.overrides.kit import cpp

SOURCE = Path(__file__).parent / "csrc" / "silu_and_mul.cpp"
_P, _I = ctypes.c_void_p, ctypes.c_int64


def missing() -> str | None:
    """Return why the kernel cannot run on this machine; None if it can. Compiles it."""
    found = cpp.library(SOURCE)
    return found if isinstance(found, str) else None


@cache
def _kernel() -> Callable[..., None]:
    return cpp.function(cpp.library(SOURCE), "silu_and_mul", _P, _P, _I, _I, _I, ctypes.c_int)


def activate(x: torch.Tensor) -> torch.Tensor | None:
    """The op's result, or None for a call that the kernel does not support."""
    if x.dtype not in cpp.DTYPES or x.numel() == 0 or not (x.is_contiguous() or x.dim() == 2):
        return None
    stride = x.stride(0) if x.dim() == 2 else x.shape[-1]
    if x.stride(-1) != 1:
        return None
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    _kernel()(x.data_ptr(), out.data_ptr(), out.numel() // size, size, stride, cpp.DTYPES[x.dtype])
    return out
