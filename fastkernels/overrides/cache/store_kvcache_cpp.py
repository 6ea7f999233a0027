"""store_kvcache on the CPU in C++: csrc/store_kvcache.cpp, compiled once by the machine's compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from fastkernels.overrides.kit import cpp

SOURCE = Path(__file__).parent / "csrc" / "store_kvcache.cpp"
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Call(ctypes.Structure):
    """Call of the source."""

    _fields_ = [
        *((name, _P) for name in ("key", "value", "keys", "values", "slots")),
        *((name, _I) for name in ("tokens", "heads", "bytes", "blocks", "block_size", "wide")),
        *((name, _I) for name in ("k_t", "k_h", "v_t", "v_h")),
        *((name, _I) for name in ("keys_b", "keys_s", "keys_h", "values_b", "values_s", "values_h")),
    ]


def missing() -> str | None:
    """Return why the kernel cannot run on this machine; None if it can. Compiles it."""
    found = cpp.library(SOURCE)
    return found if isinstance(found, str) else None


@cache
def _kernel() -> Callable[..., int]:
    return cpp.function(cpp.library(SOURCE), "store_kvcache", ctypes.POINTER(_Call), returns=ctypes.c_int64)


def unsupported(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, k_scale: float, v_scale: float,
) -> bool:  # fmt: skip
    """Whether the kernel cannot run this call."""
    return (
        not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
        or k_scale != 1.0
        or v_scale != 1.0
        or key.numel() == 0
        or slot_mapping.dtype not in (torch.int64, torch.int32)
        or any(t.stride(-1) != 1 for t in (key, value, key_cache, value_cache, slot_mapping))
    )


def store(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """Raise IndexError for a slot past the cache; nothing is stored then."""
    size = key.element_size()
    tokens, heads, dims = key.shape
    strides = (*key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3])
    call = _Call(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
        tokens, heads, dims * size, *key_cache.shape[:2], slot_mapping.dtype == torch.int64,
        *(stride * size for stride in strides),
    )  # fmt: skip
    wrong = _kernel()(call)
    if wrong >= 0:
        blocks, block_size = key_cache.shape[:2]
        raise IndexError(
            f"store_kvcache: slot_mapping[{wrong}] is {int(slot_mapping[wrong])}, the cache has {blocks} blocks of"
            f" {block_size} tokens"
        )
