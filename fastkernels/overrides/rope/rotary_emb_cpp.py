"""rotary_emb on the CPU in C++: csrc/rotary_emb.cpp. It computes the reference's values, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fastkernels.overrides.kit import cpp

SOURCE = Path(__file__).parent / "csrc" / "rotary_emb.cpp"
EXACT = "-ffp-contract=off"  # a fused multiply-add does not round the product
TRUNCATED = 3  # bfloat16 whose results are truncated
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Call(ctypes.Structure):
    """Call of the source."""

    _fields_ = [
        *((name, _P) for name in ("query", "key", "cosines", "sines")),
        *((name, _I) for name in ("tokens", "query_heads", "key_heads", "half")),
        *((name, _I) for name in ("query_t", "query_h", "key_t", "key_h", "table_t")),
    ]


def missing() -> str | None:
    """Return why the kernel cannot run on this machine; None if it can. Compiles it."""
    found = cpp.library(SOURCE, EXACT)
    return found if isinstance(found, str) else None


@cache
def _kernel() -> Callable[..., None]:
    return cpp.function(cpp.library(SOURCE, EXACT), "rotary_emb", ctypes.POINTER(_Call), ctypes.c_int)


def unsupported(
    query: torch.Tensor, key: torch.Tensor | None, is_neox_style: bool, round_products: bool
) -> bool:
    """Whether the kernel cannot run this call."""
    if key is None or not is_neox_style or round_products or query.numel() == 0:
        return True
    return (
        query.dtype not in cpp.DTYPES
        or key.dtype != query.dtype
        or query.stride(-1) != 1
        or key.stride(-1) != 1
    )


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, truncates: bool
) -> None:
    """query, key: [T, heads, head_size]; cosines, sines: [T, 1, rotary_dim / 2] float32."""
    call = _Call(
        query.data_ptr(), key.data_ptr(), cosines.data_ptr(), sines.data_ptr(), len(query), query.shape[1],
        key.shape[1], cosines.shape[-1], *query.stride()[:2], *key.stride()[:2], cosines.stride(0),
    )  # fmt: skip
    _kernel()(call, TRUNCATED if truncates else cpp.DTYPES[query.dtype])
