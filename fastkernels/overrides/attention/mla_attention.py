"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the layer between its projections, with its cache."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata, get_forward_context
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.attention.mla_decode import mla_decode
from fastkernels.overrides.attention.mla_prefill import mla_prefill
from fastkernels.overrides.cache.concat_and_cache_mla import concat_and_cache_mla


class LatentAttention(PagedAttention):
    """Attention of this rank's heads over a cache of latents, which all ranks and heads share.

    num_heads         of this rank
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim  channels of a head's key without and with positions, and its value
    kv_lora_rank      channels of a token's latent
    kv_b_proj         its weight [num_heads * (nope + v), rank] maps a latent to each head's key and value

    kv_cache is a tuple of one tensor [blocks, block_size, rank + rope]. Keys and values are never expanded: queries are
    multiplied with the keys' part of kv_b_proj, and the result with the values' part.
    """

    kv_cache: tuple[torch.Tensor] | None  # type: ignore[assignment]

    def __init__(
        self, num_heads: int, scale: float, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
        kv_lora_rank: int, kv_b_proj: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._build(num_heads, kv_lora_rank + qk_rope_head_dim, scale, 1, None, 0.0)
        self.qk_nope_head_dim, self.v_head_dim, self.kv_lora_rank = qk_nope_head_dim, v_head_dim, kv_lora_rank
        self._kv_b_proj = (kv_b_proj,)  # a tuple: the projection is a module of the layer around this one

    def cache_shapes(self, blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        return ((blocks, block_size, self.head_size),)

    def forward(self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """q: [T, H, nope + rope]; kv_c_normed: [T, rank]; k_pe: [T, rope]. Returns [T, H * v_head_dim].

        The rotary embedding is already applied to q and k_pe. Raises RuntimeError without a cache.
        """
        if self.kv_cache is None:
            raise RuntimeError("no KV cache is bound: set kv_cache = (latents,) on every attention layer")
        metadata = get_forward_context().of(self)
        up = self._kv_b_proj[0].weight.view(self.num_heads, -1, self.kv_lora_rank)
        nope, rope = q.split([self.qk_nope_head_dim, q.shape[2] - self.qk_nope_head_dim], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), up[:, : self.qk_nope_head_dim]).transpose(0, 1)
        queries = torch.cat((absorbed, rope), dim=-1)
        if metadata.backend is not None:
            out = metadata.backend.forward(self, queries, kv_c_normed, k_pe, metadata)
        else:
            self.store(kv_c_normed, k_pe, metadata)
            out = self.attend(queries, metadata)
        values = torch.bmm(out.transpose(0, 1), up[:, self.qk_nope_head_dim :].transpose(1, 2))
        return values.transpose(0, 1).reshape(len(q), self.num_heads * self.v_head_dim)

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
