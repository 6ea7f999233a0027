"""attention_decode on the CPU: PyTorch's scaled_dot_product_attention on each sequence's own keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastkernels.core.forward_context import once_per_step

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
    alibi_slopes: None = None,
) -> torch.Tensor:  # fmt: skip
    """Nothing past a sequence's end has an effect. Queries that share a key head are a sequence of queries for SDPA.

    One call serves all sequences, unless padding to the longest would make it slower.
    """
    parts, empty = once_per_step(_plan, seq_lens, block_table, key_cache.shape[1], window_left)
    if not parts:
        return torch.zeros_like(q)
    grouped = q.reshape(len(q), key_cache.shape[2], -1, q.shape[2])
    outs = [_attend(grouped[part.rows], part, key_cache, value_cache, scale) for part in parts]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    for row in empty:
        out[row] = 0
    return out.reshape(q.shape)


class _Part(NamedTuple):
    """Sequences that one call of SDPA serves, in copies of their blocks.

    blocks      [sequences * blocks of each]
    first, end  the keys of the copies that SDPA reads
    behind      [n]: places in the flattened copies that are no key of their sequence
    mask        [sequences, 1, 1, end - first]; None: all keys are read
    """

    rows: slice
    blocks: torch.Tensor
    first: int
    end: int
    behind: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def _plan(
    seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int, window_left: int
) -> tuple[list[_Part], list[int]]:
    """The calls of SDPA for a batch, and its rows without keys. It is the same for every layer of a step."""
    lens = seq_lens.tolist()
    if not any(lens):
        return [], []
    empty = [row for row, length in enumerate(lens) if length == 0]
    # The first block that a row reads, and the places of its first and last keys in its copy
    starts = [max(0, n - 1 - window_left) if window_left >= 0 else 0 for n in lens]
    skipped = [start // block_size for start in starts]
    ends = [n - skip * block_size for n, skip in zip(lens, skipped, strict=True)]
    starts = [start - skip * block_size for start, skip in zip(starts, skipped, strict=True)]
    if len(lens) == 1 or len(lens) * max(ends) > PADDED * sum(ends):
        return [
            _Part(slice(row, row + 1), block_table[row, skipped[row] : -(-n // block_size)], starts[row], ends[row])
            for row, n in enumerate(lens)
        ], empty  # fmt: skip
    longest = max(ends)
    columns = torch.arange(-(-longest // block_size)) + torch.tensor(skipped).unsqueeze(1)
    used = (seq_lens.unsqueeze(1) - 1).clamp_(min=0) // block_size
    blocks = block_table.gather(1, torch.minimum(columns, used)).view(-1).clamp_(min=0)
    everyone = slice(0, len(lens))
    if min(ends) == longest and max(starts) == 0:
        return [_Part(everyone, blocks, 0, longest)], empty
    at = torch.arange(columns.shape[1] * block_size)
    inside = (at < torch.tensor(ends).unsqueeze(1)) & (at >= torch.tensor(starts).unsqueeze(1))
    behind = (~inside).view(-1).nonzero().view(-1)  # a masked NaN would still be NaN
    mask = inside[:, :longest].view(len(lens), 1, 1, longest)
    return [_Part(everyone, blocks, 0, longest, behind, mask)], empty


def _attend(
    q: torch.Tensor, part: _Part, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [sequences, kv_heads, group, D] to the same."""
    keys, values = (_copied(cache, part).transpose(1, 2) for cache in (key_cache, value_cache))
    return F.scaled_dot_product_attention(q, keys, values, part.mask, scale=scale)


def _copied(cache: torch.Tensor, part: _Part) -> torch.Tensor:
    """[sequences, keys, kv_heads, D], zeros where there is no key."""
    copy = cache.index_select(0, part.blocks)
    if part.behind is not None:
        copy.view(-1, *cache.shape[2:]).index_fill_(0, part.behind, 0)
    count = part.rows.stop - part.rows.start
    return copy.view(count, -1, *cache.shape[2:])[:, part.first : part.end]
