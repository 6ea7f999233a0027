"""attention_decode on the CPU: PyTorch's scaled_dot_product_attention on each sequence's own keys."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PADDED = 2  # sequences of unequal lengths are padded while this costs at most so many times their keys


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
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: None = None,
) -> torch.Tensor:  # fmt: skip
    """Nothing past a sequence's end has an effect. Queries that share a key head are a sequence of queries for SDPA.

    One call serves all sequences, unless padding to the longest would make it slower.
    """
    lens = seq_lens.tolist()
    if not any(lens):
        return torch.zeros_like(q)
    grouped = q.reshape(len(q), key_cache.shape[2], -1, q.shape[2])
    caches = key_cache, value_cache, scale, window_left
    if len(lens) * max(lens) <= PADDED * sum(lens):
        out = _attend(grouped, seq_lens, block_table, lens, *caches)
    else:
        rows = (slice(row, row + 1) for row in range(len(lens)))
        out = torch.cat([_attend(grouped[r], seq_lens[r], block_table[r], lens[r], *caches) for r in rows])
    for row, length in enumerate(lens):
        if length == 0:
            out[row] = 0
    return out.reshape(q.shape)


def _attend(
    q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, lens: list[int], key_cache: torch.Tensor,
    value_cache: torch.Tensor, scale: float, window_left: int,
) -> torch.Tensor:  # fmt: skip
    """q [B, kv_heads, group, D] over copies of the sequences' blocks, padded to the longest."""
    block_size = key_cache.shape[1]
    # The first block that a row reads, and the places of its first and last keys in its copy
    starts = [max(0, n - 1 - window_left) if window_left >= 0 else 0 for n in lens]
    skipped = [start // block_size for start in starts]
    ends = [n - skip * block_size for n, skip in zip(lens, skipped, strict=True)]
    starts = [start - skip * block_size for start, skip in zip(starts, skipped, strict=True)]
    longest = max(ends)
    if len(lens) == 1:
        blocks = block_table[0, skipped[0] : -(-lens[0] // block_size)]
    else:
        columns = torch.arange(-(-longest // block_size)) + torch.tensor(skipped).unsqueeze(1)
        used = (seq_lens.unsqueeze(1) - 1).clamp_(min=0) // block_size
        blocks = block_table.gather(1, torch.minimum(columns, used)).view(-1).clamp_(min=0)
    key, value = (
        cache.index_select(0, blocks).view(len(lens), -1, *cache.shape[2:])[:, :longest]
        for cache in (key_cache, value_cache)
    )
    mask = None
    if len(lens) > 1 and (min(ends) < longest or max(starts) > 0):
        at = torch.arange(longest)
        mask = at < torch.tensor(ends).unsqueeze(1)
        for row, end in enumerate(ends):
            if end < longest:  # a masked NaN would still be NaN
                key[row, end:] = 0
                value[row, end:] = 0
        if max(starts) > 0:
            mask &= at >= torch.tensor(starts).unsqueeze(1)
        mask = mask.view(len(lens), 1, 1, longest)
    elif starts[0] > 0:
        key, value = key[:, starts[0] :], value[:, starts[0] :]
    return F.scaled_dot_product_attention(q, key.transpose(1, 2), value.transpose(1, 2), mask, scale=scale)
