"""attention_decode on the CPU: PyTorch's scaled_dot_product_attention on each sequence's own keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def supports_sdpa(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: Any = None, block_table: Any = None,
    max_seqlen_k: int = 0, scale: float = 1.0, window_left: int = -1, softcap: float = 0.0, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> str | None:  # fmt: skip
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if key_cache.dtype != q.dtype or value_cache.dtype != q.dtype:
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, q is {q.dtype}"
    if (k_scale, v_scale) != (1.0, 1.0):
        return f"scales {k_scale} and {v_scale} are not 1"
    return f"softcap {softcap} is not 0" if softcap > 0 else None


def decode_sdpa(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_k: int, scale: float, window_left: int = -1, softcap: float = 0.0,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Nothing past a sequence's end is read. Queries that share a key head are a sequence of queries for SDPA."""
    block_size, kv_heads, d = key_cache.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype)
    grouped = q.reshape(len(q), kv_heads, -1, d)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            out[row].zero_()
            continue
        first = max(0, length - 1 - window_left) if window_left >= 0 else 0
        skipped = first // block_size
        blocks = block_table[row, skipped : -(-length // block_size)]
        seen = slice(first - skipped * block_size, length - skipped * block_size)
        key, value = (
            cache.index_select(0, blocks).flatten(0, 1)[seen].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        out[row] = F.scaled_dot_product_attention(grouped[row], key, value, scale=scale).view(-1, d)
    return out
