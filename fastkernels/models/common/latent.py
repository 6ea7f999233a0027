"""The attention block of multi-head latent attention: projections, norms and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.description import LatentAttention, Norm
from fastkernels.overrides.latent_attention import mla_attention
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmReplicatedLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.rope.vllm import get_rope


class DecoderLatentAttention(nn.Module):
    """Self-attention of a description: positions [T] and hidden_states [T, H] to [T, H]. Ranks share the heads."""

    def __init__(
        self, a: LatentAttention, make_norm: Callable[[Norm, int], nn.Module], hidden: int, prefix: str
    ) -> None:
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
        self.rotary_emb = get_rope(a.rope_size, a.max_positions, not a.interleaved, a.rope)
        self.attn = mla_attention.LatentAttention(
            self.num_heads, size**-0.5 if a.scale is None else a.scale, a.nope_size, a.rope_size, a.value_size, a.rank,
            self.kv_b_proj,
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        a = self.described
        if a.query_rank is None:
            q, _ = self.q_proj(hidden_states)
            latent, _ = self.kv_a_proj_with_mqa(hidden_states)
        else:
            both, _ = self.fused_qkv_a_proj(hidden_states)
            q, latent = both.split([a.query_rank, a.rank + a.rope_size], dim=-1)
            q, _ = self.q_b_proj(self.q_a_layernorm(q.contiguous()))
        q = q.view(-1, self.num_heads, a.nope_size + a.rope_size)
        kv_c, k_pe = latent.split([a.rank, a.rope_size], dim=-1)
        kv_c = self.kv_a_layernorm(kv_c.contiguous())
        self.rotary_emb(positions, q[..., a.nope_size :], k_pe.unsqueeze(1))  # in place
        out, _ = self.o_proj(self.attn(q, kv_c, k_pe))
        return out
