"""Attention of every token of a sequence to all of its tokens, as in diffusion language models.

The keys of a sequence are those that a step computes, or lie in a paged cache, into which the step writes its own. A
step may compute any tokens of a sequence: the others keep the keys that an earlier step wrote.
"""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.forward_context import AttentionMetadata, get_forward_context, once_per_step
from fastkernels.core.layer_state import KVSpec
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.overrides.dense_attention.attention_dense import attention_dense


class BidirectionalAttention(nn.Module):
    """query, key, value: [T, heads * head_size]. Returns [T, heads * head_size].

    The engine binds `kv_cache` as PagedAttention describes it. The first `num_whole` sequences of the step's
    AttentionMetadata compute all of their tokens, and do not read it. Its `plan` is the result of `_rows` for the
    others, or None.
    """

    ops = ("attention_dense", "store_kvcache")
    keeps = KVSpec()
    kv_group = 0
    window_left = -1
    kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = (
            num_heads,
            num_kv_heads,
            head_size,
            scale,
        )

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros for `kv_cache`."""
        shape = (blocks, block_size, self.num_kv_heads, self.head_size)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        m = get_forward_context()
        q = query.view(-1, self.num_heads, self.head_size)
        k, v = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        if self.kv_cache is not None and len(m.slot_mapping):
            store_kvcache(k, v, *self.kv_cache, m.slot_mapping)
        tokens, parts = m.num_whole_tokens, []
        if m.num_whole:
            starts = m.cu_seqlens_q[: m.num_whole + 1]
            parts.append(self._dense(q[:tokens], k[:tokens], v[:tokens], starts, starts, m))
        if m.num_whole < len(m.seq_lens):
            parts.append(self._from_cache(q[tokens:], m))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(-1, self.num_heads * self.head_size)

    def _from_cache(self, q: torch.Tensor, m: AttentionMetadata) -> torch.Tensor:
        if self.kv_cache is None:
            raise RuntimeError("no KV cache is bound, and a sequence does not compute all of its tokens")
        block_size, n = self.kv_cache[0].shape[1], m.num_whole
        lens, table = m.seq_lens[n:], m.block_table[n:]
        rows, starts_k = m.plan or once_per_step(_rows, lens, table, block_size, m.max_seqlen_k)
        k, v = (cache.flatten(0, 1).index_select(0, rows) for cache in self.kv_cache)
        starts_q = m.cu_seqlens_q[n:] - m.num_whole_tokens
        return self._dense(q, k, v, starts_q, starts_k, m)

    def _dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
        m: AttentionMetadata,
    ) -> torch.Tensor:  # fmt: skip
        rows, longest = len(starts_q) - 1, m.max_seqlen_q
        if starts_q is starts_k and rows * longest == len(q):  # more providers support a batch
            batch = (x.view(rows, longest, *x.shape[1:]) for x in (q, k, v))
            return attention_dense(*batch, self.scale).flatten(0, 1)
        return attention_dense(
            q[None], k[None], v[None], self.scale, None, starts_q, starts_k, m.max_seqlen_q, m.max_seqlen_k
        )[0]


def _rows(
    lens: torch.Tensor, table: torch.Tensor, block_size: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the flat cache with the keys of each sequence, one after the other; where each one starts [B + 1]).

    Without a synchronization the number of keys is unknown: the first result has `longest` for each sequence.
    """
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, out=starts[1:])
    at = torch.arange(len(lens) * longest, dtype=torch.int32, device=lens.device)
    of = (torch.searchsorted(starts, at, right=True) - 1).clamp_max(len(lens) - 1)
    inside = (at - starts[of]).clamp_max(longest - 1)
    blocks = table[of, inside // block_size]
    return blocks.long() * block_size + inside % block_size, starts
