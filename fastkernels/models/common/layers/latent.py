"""The attention block of multi-head latent attention, and the indexer of sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.description import Indexer, LatentAttention, Norm
from fastkernels.overrides.cache.concat_and_cache_mla import concat_and_cache_mla
from fastkernels.overrides.latent_attention import mla_attention
from fastkernels.overrides.latent_attention.mla_rope_store import mla_rope_store
from fastkernels.overrides.latent_attention.sparse_indexer import SparseAttnIndexer
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.vllm import VllmRMSNorm
from fastkernels.overrides.rope.rotary_emb import rotary_emb
from fastkernels.overrides.rope.vllm import (
    OF_TABLES,
    VllmDeepseekScalingRotaryEmbedding,
    VllmDeepseekScalingRotaryEmbedding_0_26,
    get_rope,
)

# Their tables are not rounded to the dtype of the queries.
UNCAST = VllmDeepseekScalingRotaryEmbedding, VllmDeepseekScalingRotaryEmbedding_0_26


class DecoderIndexer(nn.Module):
    """The indexer of a description, the same on all ranks: from hidden_states and the queries' latents to positions.

    The published code also rotates queries and keys by a Hadamard matrix before it quantizes them: products stay the
    same. Here, as in vLLM, keys of an FP8 cache are quantized without it; queries are not quantized.
    """

    def __init__(
        self,
        x: Indexer,
        a: LatentAttention,
        make_norm: Callable[[Norm, int], nn.Module],
        hidden: int,
        prefix: str,
    ) -> None:
        super().__init__()
        assert a.query_rank is not None
        self.described, self.rope_size = x, a.rope_size
        self.wq_b = VllmReplicatedLinear(
            a.query_rank, x.heads * x.head_size, bias=False, prefix=f"{prefix}.wq_b"
        )
        self.wk = VllmReplicatedLinear(hidden, x.head_size, bias=False, prefix=f"{prefix}.wk")
        self.k_norm = make_norm(x.norm, x.head_size)
        self.weights_proj = VllmReplicatedLinear(hidden, x.heads, bias=False, prefix=f"{prefix}.weights_proj")
        self.rotary_emb = get_rope(a.rope_size, a.max_positions, not x.interleaved, a.rope)
        self.indexer_op = SparseAttnIndexer(x.heads, x.head_size, x.topk)
        self.scale = (x.heads * x.head_size) ** -0.5

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, q_latent: torch.Tensor
    ) -> torch.Tensor | None:
        """positions: [T]; hidden_states: [T, H]; q_latent: [T, query_rank]. Returns [T, topk]; None: all keys."""
        x = self.described
        q, _ = self.wq_b(q_latent)
        k, _ = self.wk(hidden_states)
        weights, _ = self.weights_proj(hidden_states)
        q, k = q.view(-1, x.heads, x.head_size), self.k_norm(k)
        self.rotary_emb(positions, q[..., : self.rope_size], k[:, None, : self.rope_size])  # in place
        return self.indexer_op(q, k, weights.float() * self.scale)


class Selection:
    """The keys that each query of the step attends to, from the last layer with an indexer: [T, topk]; None: all."""

    indices: torch.Tensor | None = None


class DecoderLatentAttention(nn.Module):
    """Self-attention of a description: positions [T] and hidden_states [T, H] to [T, H]. Ranks share the heads.

    before: the block of the layer before. All blocks of a model have one selection.
    """

    def __init__(
        self, a: LatentAttention, make_norm: Callable[[Norm, int], nn.Module], hidden: int, prefix: str,
        before: DecoderLatentAttention | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.described, size = a, a.nope_size + a.rope_size
        self.num_heads = parallel.divide(a.heads, parallel.get_tp_size(), "heads")
        if a.query_rank is None:
            self.q_proj = VllmColumnParallelLinear(
                hidden, a.heads * size, bias=False, prefix=f"{prefix}.q_proj"
            )
            self.kv_a_proj_with_mqa = VllmReplicatedLinear(
                hidden, a.rank + a.rope_size, bias=a.bias, prefix=f"{prefix}.kv_a_proj_with_mqa"
            )
        else:
            self.fused_qkv_a_proj = VllmMergedColumnParallelLinear(
                hidden, [a.query_rank, a.rank + a.rope_size], bias=a.bias, prefix=f"{prefix}.fused_qkv_a_proj",
                disable_tp=True,
            )  # fmt: skip
            self.q_a_layernorm = make_norm(a.norm, a.query_rank)
            self.q_b_proj = VllmColumnParallelLinear(
                a.query_rank, a.heads * size, bias=False, prefix=f"{prefix}.q_b_proj"
            )
        self.kv_a_layernorm = make_norm(a.norm, a.rank)
        self.kv_b_proj = VllmColumnParallelLinear(
            a.rank, a.heads * (a.nope_size + a.value_size), bias=False, prefix=f"{prefix}.kv_b_proj"
        )
        self.o_proj = VllmRowParallelLinear(
            a.heads * a.value_size, hidden, bias=a.bias, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb: Any = None
        if a.rope is not None:
            self.rotary_emb = get_rope(a.rope_size, a.max_positions, not a.interleaved, a.rope)
        self.attn = mla_attention.LatentAttention(
            self.num_heads, size**-0.5 if a.scale is None else a.scale, a.nope_size, a.rope_size, a.value_size, a.rank,
            self.kv_b_proj, None if a.indexer is None else a.indexer.topk,
        )  # fmt: skip
        self.selection: Selection = Selection() if before is None else before.selection
        self.indexer = None
        if a.indexer is not None and not a.indexer.shared:
            self.indexer = DecoderIndexer(a.indexer, a, make_norm, hidden, f"{prefix}.indexer")

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a = self.described
        if a.query_rank is None:
            q, _ = self.q_proj(hidden_states)
            latent, _ = self.kv_a_proj_with_mqa(hidden_states)
        else:
            both, _ = self.fused_qkv_a_proj(hidden_states)
            q, latent = both.split([a.query_rank, a.rank + a.rope_size], dim=-1)
            q_latent = self.q_a_layernorm(q)
            if self.indexer is not None:
                self.selection.indices = self.indexer(positions, hidden_states, q_latent)
            q, _ = self.q_b_proj(q_latent)
        q = q.view(-1, self.num_heads, a.nope_size + a.rope_size)
        norm: Any = self.kv_a_layernorm
        rope, indices = self.rotary_emb, self.selection.indices
        if self._fuses(latent):
            out = self.attn.from_projections(
                positions, q, latent, norm.weight, norm.variance_epsilon, rope.cos_sin_cache, rope.is_neox_style,
                type(rope) in OF_TABLES, indices,
            )  # fmt: skip
        else:
            kv_c, k_pe = latent.split([a.rank, a.rope_size], dim=-1)
            kv_c = norm(kv_c.contiguous())
            if rope is not None:
                rope(positions, q[..., a.nope_size :], k_pe.unsqueeze(1))  # in place
            out = self.attn(q, kv_c, k_pe, indices)
        return self.o_proj(out)[0]

    def _fuses(self, latent: torch.Tensor) -> bool:
        """Whether mla_rope_store replaces the norm, rotary_emb and concat_and_cache_mla of this call.

        It does on a GPU, or where it is requested by name, if none of the other ops is requested by name.
        """
        return (
            mla_rope_store.requested != "off"
            and (latent.is_cuda or mla_rope_store.requested == "named")
            and not any(op.requested for op in (rms_norm, rotary_emb, concat_and_cache_mla))
            and type(self.kv_a_layernorm) is VllmRMSNorm
            and type(self.rotary_emb) in (*OF_TABLES, *UNCAST)
            and type(self.attn) is mla_attention.LatentAttention
            and self.attn.kv_cache is not None
        )
