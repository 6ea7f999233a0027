"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the layer between its projections, with its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata, get_forward_context
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.attention.paged_cache import take_blocks
from fastkernels.overrides.cache.concat_and_cache_mla import concat_and_cache_mla
from fastkernels.overrides.latent_attention.expansion import Expansion
from fastkernels.overrides.latent_attention.mla_decode import mla_decode
from fastkernels.overrides.latent_attention.mla_expanded import mla_expanded
from fastkernels.overrides.latent_attention.mla_prefill import mla_prefill
from fastkernels.overrides.latent_attention.mla_rope_store import mla_rope_store
from fastkernels.overrides.latent_attention.mla_sparse import mla_sparse
from fastkernels.overrides.latent_attention.sparse_indexer import chosen


class LatentAttention(PagedAttention):
    """Attention of this rank's heads over a cache of latents, which all ranks and heads share.

    num_heads         of this rank
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim  channels of a head's key without and with positions, and its value
    kv_lora_rank      channels of a token's latent
    kv_b_proj         its weight [num_heads * (nope + v), rank] maps a latent to each head's key and value
    topk              keys of a query in sparse attention (DSA), in steps with longer sequences; None: all

    kv_cache is a tuple of one tensor [blocks, block_size, rank + rope]. Queries are multiplied with the keys' part of
    kv_b_proj, and the result with the values' part, so that heads attend to latents. Where the step's plan is an
    Expansion, prompts attend to expanded keys and values instead: many queries share the cost of expanding a key, and
    each product has 192 and 128 channels instead of 576 and 512 (sizes of DeepSeek-V3).
    """

    kv_cache: tuple[torch.Tensor] | None  # type: ignore[assignment]
    ops: tuple[str, ...] = (
        "mla_rope_store", "concat_and_cache_mla", "mla_decode", "mla_prefill", "mla_expanded"
    )  # fmt: skip

    def __init__(
        self, num_heads: int, scale: float, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
        kv_lora_rank: int, kv_b_proj: Any, topk: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._build(num_heads, kv_lora_rank + qk_rope_head_dim, scale, 1, None, 0.0)
        self.qk_nope_head_dim, self.v_head_dim, self.kv_lora_rank = qk_nope_head_dim, v_head_dim, kv_lora_rank
        self.topk = topk
        if topk is not None:
            self.ops = (*self.ops, "mla_sparse")
        self._kv_b_proj = (kv_b_proj,)  # a tuple: the projection is a module of the layer around this one

    def cache_shapes(self, blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        return ((blocks, block_size, self.head_size),)

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [T, H, nope + rope]; kv_c_normed: [T, rank]; k_pe: [T, rope]. Returns [T, H * v_head_dim].

        indices: [T, topk] int32, the positions of the keys that each query attends to (mla_sparse); None: all; of
        fewer queries where the step's plan has a `rest`. The rotary embedding is already applied to q and k_pe. Raises
        RuntimeError without a cache.
        """
        return self.latent(q, kv_c_normed, k_pe, indices)

    def latent(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer, with the arguments of `forward` here; a host's class has others."""
        if self.kv_cache is None:
            raise RuntimeError("no KV cache is bound: set kv_cache = (latents,) on every attention layer")
        metadata = get_forward_context().of(self)
        self.store(kv_c_normed, k_pe, metadata)
        if isinstance(metadata.plan, Expansion):
            return self._expanded(q, metadata, metadata.plan, indices)
        return self._rotated(q, metadata, indices)

    def from_projections(
        self, positions: torch.Tensor, q: torch.Tensor, latent: torch.Tensor, weight: torch.Tensor, eps: float,
        table: torch.Tensor, is_neox_style: bool, cast_cache: bool, indices: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`forward` with the norm of the latents and the rotary embedding, see mla_rope_store. May overwrite q.

        q: [T, H, nope + rope]; latent: [T, rank + rope]; weight: [rank], of the norm
        """
        assert self.kv_cache is not None
        metadata, rotary = get_forward_context().of(self), q[..., self.qk_nope_head_dim :]
        in_place = isinstance(metadata.plan, Expansion)
        queries = q if in_place else self._queries(q)
        mla_rope_store(
            positions, rotary, latent, weight, self.kv_cache[0],
            rotary if in_place else queries[..., self.kv_lora_rank :], metadata.slot_mapping, table, is_neox_style,
            cast_cache, eps, self.k_scale,
        )  # fmt: skip
        if isinstance(metadata.plan, Expansion):
            return self._expanded(q, metadata, metadata.plan, indices)
        return self._absorbed(q, queries, metadata, indices)

    def _queries(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for the absorbed queries, [T, H, rank + rope]."""
        return q.new_empty(*q.shape[:2], self.head_size)

    def _expanded(
        self, q: torch.Tensor, m: AttentionMetadata, plan: Expansion, indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Prompts with expanded keys, decodes in the absorbed form; in sparse attention all of the plan's `rest`."""
        n, rank = m.num_decodes, self.kv_lora_rank
        latents = take_blocks(self.kv_cache[0], plan.blocks).to(q.dtype).flatten(0, 1)  # type: ignore[index]
        latents = latents if self.k_scale == 1.0 else latents * self.k_scale
        both = self._kv_b_proj[0](latents[:, :rank])[0].unflatten(-1, (self.num_heads, -1))
        out = mla_expanded(
            q, both, latents[:, rank:], plan.cu_seqlens_q, plan.starts, plan.seq_lens, plan.max_seqlen_q, self.scale,
            m.padded,
        )  # fmt: skip
        if plan.rest is not None:
            rows = plan.rest.rows
            out[rows] = self._rotated(q[rows], plan.rest.of(m), indices).view(-1, *out.shape[1:])
        elif n:
            decodes = replace(
                m, seq_lens=m.seq_lens[:n], block_table=m.block_table[:n], max_seqlen_q=1, plan=None,
                max_seqlen_k=m.max_decode_seqlen_k,
            )  # fmt: skip
            self._rotated(q[:n], decodes, out=out[:n])
        return out.flatten(1)

    def _rotated(
        self, q: torch.Tensor, m: AttentionMetadata, indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The absorbed form, for queries [T, H, nope + rope] that are rotated."""
        queries = self._queries(q)
        queries[..., self.kv_lora_rank :] = q[..., self.qk_nope_head_dim :]
        return self._absorbed(q, queries, m, indices, out)

    def _absorbed(
        self,
        q: torch.Tensor,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries and results go through kv_b_proj, and the stored latents stay as they are.

        q: [T, H, nope + rope], of which `nope` is read; queries: [T, H, rank + rope] with the rotated channels, of
        which `rank` is written; out: [T, H, v_head_dim], for the results
        """
        rank, nope = self.kv_lora_rank, self.qk_nope_head_dim
        up = self._kv_b_proj[0].weight.view(self.num_heads, -1, rank)
        torch.bmm(q[..., :nope].transpose(0, 1), up[:, :nope], out=queries[..., :rank].transpose(0, 1))
        if indices is not None:
            latents = self._attend_sparse(queries, indices, metadata)
        elif metadata.backend is not None:
            latents = metadata.backend.forward(self, queries, None, None, metadata)
        else:
            latents = self.attend(queries, metadata)
        values = q.new_empty(len(q), self.num_heads, self.v_head_dim) if out is None else out
        torch.bmm(latents.transpose(0, 1), up[:, nope:].transpose(1, 2), out=values.transpose(0, 1))
        return values.flatten(1)

    def store(self, kv_c: torch.Tensor, k_pe: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the step's latents into the cache."""
        assert self.kv_cache is not None
        concat_and_cache_mla(kv_c, k_pe, self.kv_cache[0], metadata.slot_mapping, self.k_scale)

    def attend(
        self, q: torch.Tensor, m: AttentionMetadata, decode: Any = mla_decode, prefill: Any = mla_prefill
    ) -> torch.Tensor:
        """Attend with absorbed queries [T, H, rank + rope]; returns [T, H, rank]. decode, prefill: the functions."""
        assert self.kv_cache is not None
        cache, rest = self.kv_cache[0], (self.scale, self.kv_lora_rank, self.k_scale)
        if m.decode_only:
            return decode(q, cache, m.seq_lens, m.block_table, m.max_seqlen_k, *rest)
        n = m.num_decodes
        out = prefill(
            q, cache, m.cu_seqlens_q[n:], m.seq_lens[n:], m.block_table[n:], m.max_seqlen_q, m.max_seqlen_k, *rest
        )  # fmt: skip
        if n:
            out[:n] = decode(q[:n], cache, m.seq_lens[:n], m.block_table[:n], m.max_decode_seqlen_k, *rest)
        return out

    def _attend_sparse(self, q: torch.Tensor, indices: torch.Tensor, m: AttentionMetadata) -> torch.Tensor:
        """Attend with absorbed queries to these keys, decodes apart from prompts; returns [T, H, rank]."""
        assert self.kv_cache is not None
        n, rest = len(q) if m.decode_only else m.num_decodes, (self.scale, self.kv_lora_rank, self.k_scale)
        cache, cu, lens, table = self.kv_cache[0], m.cu_seqlens_q, m.seq_lens, m.block_table
        attend = chosen(m, mla_sparse)
        decodes = [q[:n], cache, indices[:n], cu[: n + 1], lens[:n], table[:n], 1, *rest]
        if n == len(q):
            return attend(*decodes)
        out = attend(q[n:], cache, indices[n:], cu[n:] - n, lens[n:], table[n:], m.max_seqlen_q, *rest)
        return torch.cat((attend(*decodes), out)) if n else out
