"""attention_decode on the CPU in C++: csrc/attention_decode.cpp, compiled once by the machine's compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastkernels.overrides.attention.paged_cache import check, memory
from fastkernels.overrides.kit import cpp

SOURCE = Path(__file__).parent / "csrc" / "attention_decode.cpp"
MIN_SPLIT = 256  # keys: a smaller split costs more to combine than it saves
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Call(ctypes.Structure):
    """Call of the source."""

    _fields_ = [
        *((name, _P) for name in ("q", "keys", "values", "out", "parts", "seq_lens", "table", "sinks")),
        *(
            (name, _I)
            for name in (
                "batch",
                "heads",
                "kv_heads",
                "dims",
                "blocks",
                "block_size",
                "table_size",
                "splits",
                "window_left",
            )
        ),
        *((name, _I) for name in ("q_b", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "table_b")),
        *((name, _F) for name in ("scale", "v_scale", "softcap")),
    ]


def missing() -> str | None:
    """Return why the kernel cannot run on this machine; None if it can. Compiles it."""
    found = cpp.library(SOURCE)
    return found if isinstance(found, str) else None


@cache
def _kernel() -> Callable[..., int]:
    types = (ctypes.POINTER(_Call), ctypes.c_int)
    return cpp.function(cpp.library(SOURCE), "attention_decode", *types, returns=ctypes.c_int64)


def supports_cpp(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    if q.dtype not in cpp.DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if key_cache.dtype != q.dtype or value_cache.dtype != q.dtype:
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, q is {q.dtype}"
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        return f"seq_lens is {seq_lens.dtype} and block_table {block_table.dtype}, not int32"
    named = (("q", q), ("key_cache", key_cache), ("value_cache", value_cache), ("seq_lens", seq_lens))
    for name, t in (*named, ("block_table", block_table)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def decode_cpp(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0,
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
    alibi_slopes: None = None, splits: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Nothing past a sequence's end is read. splits: parts of each sequence's keys (default: by the threads).

    Raises IndexError for a sequence with more keys than its table holds, and for a block outside the cache.
    """
    check("attention_decode", q, key_cache, value_cache)
    batch, heads, dims = q.shape
    blocks, block_size, kv_heads, _ = key_cache.shape
    out = memory("attention_decode", q, out)
    if q.numel() == 0:
        return out
    splits = splits or _splits(batch * kv_heads, max_seqlen_k)
    parts = torch.empty(batch * heads * splits * (dims + 2), dtype=torch.float32) if splits > 1 else None
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    call = _Call(
        q.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(),
        None if parts is None else parts.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(),
        None if sinks is None else sinks.data_ptr(), batch, heads, kv_heads, dims, blocks, block_size,
        block_table.shape[1], splits, window_left,
        *q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0), scale * k_scale,
        v_scale, softcap,
    )  # fmt: skip
    row = _kernel()(call, cpp.DTYPES[q.dtype])
    if row >= 0:
        used = -(-int(seq_lens[row]) // block_size)
        raise IndexError(
            f"attention_decode: sequence {row} has {int(seq_lens[row])} keys in blocks"
            f" {block_table[row, :used].tolist()}: a table holds {block_table.shape[1]} blocks of {block_size} keys,"
            f" the cache blocks 0 to {blocks - 1}"
        )
    return out


def _splits(tasks: int, max_seqlen_k: int) -> int:
    """Two tasks per thread, no split under MIN_SPLIT."""
    return max(1, min(-(-2 * torch.get_num_threads() // tasks), max_seqlen_k // MIN_SPLIT))
