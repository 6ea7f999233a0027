"""Attention of a decoder to an encoder's states, whose keys and values are computed once for a sequence."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.forward_context import get_forward_context
from fastkernels.core.layer_state import KVSpec
from fastkernels.models.common.descriptions.description import Cross
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.overrides.linear.vllm import VllmColumnParallelLinear, VllmRowParallelLinear


class CrossAttention(nn.Module):
    """hidden [T, H] to the same. Every token of a step attends to all states of its sequence.

    kv_cache: (keys, values) [blocks, block_size, heads, head_size], which the engine binds; the blocks are others than
    those of self-attention, see AttentionMetadata.cross.
    """

    kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None
    keeps = KVSpec(cross=True)

    def __init__(self, c: Cross, hidden: int, prefix: str) -> None:
        super().__init__()
        self.num_heads = parallel.divide(c.heads, parallel.get_tp_size(), "heads of cross attention")
        self.head_size, self.scale = c.head_size, c.head_size**-0.5
        size = c.heads * c.head_size
        self.q_proj = VllmColumnParallelLinear(hidden, size, return_bias=False, prefix=f"{prefix}.q_proj")
        self.k_proj = VllmColumnParallelLinear(
            hidden, size, bias=False, return_bias=False, prefix=f"{prefix}.k_proj"
        )
        self.v_proj = VllmColumnParallelLinear(hidden, size, return_bias=False, prefix=f"{prefix}.v_proj")
        self.o_proj = VllmRowParallelLinear(size, hidden, return_bias=False, prefix=f"{prefix}.o_proj")

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, ...]:
        """Return zeros for `kv_cache`."""
        shape = (blocks, block_size, self.num_heads, self.head_size)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    def store(self, states: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write keys and values of an encoder's states [M, H] to these places of the cache [M]."""
        assert self.kv_cache is not None, "the engine binds a cache first"
        k, v = (
            x(states).view(-1, self.num_heads, self.head_size).to(self.kv_cache[0].dtype)
            for x in (self.k_proj, self.v_proj)
        )
        store_kvcache(k, v, *self.kv_cache, slot_mapping)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = get_forward_context().cross
        assert self.kv_cache is not None and states is not None, "no encoder's states in this step"
        q = self.q_proj(hidden).view(-1, self.num_heads, self.head_size)
        out = attention_decode(
            q, *self.kv_cache, states.seq_lens, states.block_table, states.max_seqlen_k, self.scale
        )
        return self.o_proj(out.flatten(1))
