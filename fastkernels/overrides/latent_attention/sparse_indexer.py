"""The selection of DeepSeek's sparse attention (V3.2): the layer that keeps index keys and picks each query's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fastkernels.core.dispatch import Op
from fastkernels.core.forward_context import AttentionMetadata, get_forward_context
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.cache.concat_and_cache_mla import concat_and_cache_mla
from fastkernels.overrides.cache.indexer_k_quant_and_cache import indexer_k_quant_and_cache
from fastkernels.overrides.latent_attention.expansion import Expansion
from fastkernels.overrides.latent_attention.paged_mqa_logits import paged_mqa_logits
from fastkernels.overrides.latent_attention.top_k_per_row import top_k_per_row

MOST_LOGITS = 1 << 26  # in memory at a time: 256 MiB


def chosen(metadata: AttentionMetadata, op: Op) -> Callable[..., torch.Tensor]:
    """The op, or the provider of it that the step's backend was built with."""
    return op if metadata.backend is None else metadata.backend.function(op)


class SparseAttnIndexer(PagedAttention):
    """The positions of the topk keys that each query attends to, over a paged cache of index keys.

    kv_cache is a tuple of one tensor [blocks, block_size, head_size]: one key for each token, which all heads share.
    An FP8 cache has a second tensor, [blocks, block_size] in float32: the scale of each key, as in DeepSeek's code,
    whose blocks of 128 channels are a whole key.
    """

    kv_cache: tuple[torch.Tensor, ...] | None  # type: ignore[assignment]
    ops = ("concat_and_cache_mla", "indexer_k_quant_and_cache", "paged_mqa_logits", "top_k_per_row")

    def __init__(self, num_heads: int, head_size: int, topk: int) -> None:
        super().__init__()
        self._build(num_heads, head_size, 1.0, 1, None, 0.0)
        self.topk = topk

    def cache_shapes(self, blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        return ((blocks, block_size, self.head_size),)

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, ...]:
        keys = super().new_cache(blocks, block_size, dtype, device)
        if dtype != torch.float8_e4m3fn:
            return keys
        return *keys, torch.zeros(blocks, block_size, dtype=torch.float32, device=device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """q: [T, H, D]; k: the new keys, [T, D]; weights: [T, H] float32.

        Returns [T, topk] int32, ascending, -1 where a query sees fewer keys; of a plan's `rest` only, if there is one.
        None if all sequences of the step are so short that every query attends to all keys. Raises RuntimeError without
        a cache.
        """
        if self.kv_cache is None:
            raise RuntimeError("no KV cache is bound: set kv_cache = new_cache(...) on every indexer")
        m = get_forward_context().of(self)
        cache, scales = self.kv_cache if len(self.kv_cache) == 2 else (self.kv_cache[0], None)
        if scales is None:
            concat_and_cache_mla(*k.tensor_split(2, dim=1), cache, m.slot_mapping, self.k_scale)
        else:
            indexer_k_quant_and_cache(k, cache, scales, m.slot_mapping)
        if m.max_seqlen_k <= self.topk:
            return None
        if isinstance(m.plan, Expansion) and m.plan.rest is not None:
            own = m.plan.rest.rows
            q, weights, m = q[own], weights[own], m.plan.rest.of(m)
        score, select = chosen(m, paged_mqa_logits), chosen(m, top_k_per_row)
        found = []
        for rows, starts, lens, table, most, longest, decodes in _parts(m, len(q)):
            logits = score(
                q[rows], cache, weights[rows], starts, lens, table, most, longest, self.k_scale, scales
            )
            # Of decodes, keys that no query sees need not be read: a graph's max_seqlen_k is the model's.
            found.append(select(logits, self.topk, lens if decodes else None))
        return found[0] if len(found) == 1 else torch.cat(found)


def _parts(
    m: AttentionMetadata, tokens: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool]]:
    """Tokens of one step, and their cu_seqlens_q, seq_lens, block_table, max_seqlen_q, max_seqlen_k, "are decodes".

    Decodes come apart from prompts, and so few tokens at a time that their logits fit into memory.
    """
    n = tokens if m.decode_only else m.num_decodes
    at_once = max(1, MOST_LOGITS // max(m.max_decode_seqlen_k or m.max_seqlen_k, 1))
    for first in range(0, n, at_once):
        rows = slice(first, min(first + at_once, n))
        starts = m.cu_seqlens_q[rows.start : rows.stop + 1] - first
        longest = m.max_seqlen_k if m.decode_only else m.max_decode_seqlen_k
        yield rows, starts, m.seq_lens[rows], m.block_table[rows], 1, longest, True
    cu, lens, table = m.cu_seqlens_q[n:], m.seq_lens[n:], m.block_table[n:]
    at_once = max(1, MOST_LOGITS // max(m.max_seqlen_k, 1))
    for first in range(n, tokens, at_once):
        rows = slice(first, min(first + at_once, tokens))
        starts = cu.clamp(first, rows.stop)
        # A sequence that the next part continues ends here with its last query of this part.
        own = lens - (cu[1:] - starts[1:])
        most = min(m.max_seqlen_q, rows.stop - first)
        yield rows, starts - first, own, table, most, m.max_seqlen_k, False
