"""The attention block of a Llama layer: projections, rotary embedding and attention, shared by the hosts' classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def sliding_window(config: Any, prefix: str) -> int | None:
    """Return the window of the layer in `prefix` ('model.layers.3.self_attn'), None for full attention."""
    types = getattr(config, "layer_types", None)
    numbers = [int(part) for part in prefix.split(".") if part.isdigit()]
    if not types or not numbers or types[numbers[0]] != "sliding_attention":
        return None
    return config.sliding_window


class SelfAttention(nn.Module):
    """Base of the hosts' attention blocks, on this rank's heads: positions [T] and hidden_states [T, H] to [T, H]."""

    qkv_proj: Any
    rotary_emb: Any
    attn: Any
    o_proj: Any
    head_dim: int

    def _split_heads(self) -> None:
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def _before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Process q [T, q_size] and k [T, kv_size] before the rotary embedding; subclasses normalize them here."""
        return q, k

    def _head_norms(self) -> tuple[Any, ...]:
        """Return the norms of query and key heads that `_before_rope` applies, if any."""
        return ()

    def _after_attention(self, out: torch.Tensor) -> torch.Tensor:
        """Process the heads' outputs [T, q_size] before o_proj; subclasses normalize them here."""
        return out

    def _attend(self, positions: torch.Tensor, hidden_states: torch.Tensor, *batch: Any) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if not batch and not torch.compiler.is_compiling() and self._fuses(qkv):
            self._rope_and_store(positions, q, k, v)
            k = v = None
        else:
            q, k = self.rotary_emb(positions, *self._before_rope(q, k))
        out, _ = self.o_proj(self._after_attention(self.attn(q, k, v, *batch)))
        return out

    def _fuses(self, qkv: torch.Tensor) -> bool:
        """Return whether `_rope_and_store` replaces the head norms, rotary_emb and store_kvcache of this call."""
        return False

    def _rope_and_store(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Turn q into the input of `attn` and store keys and values in its cache."""
        raise NotImplementedError


class HeadNorms(SelfAttention):
    """Attention with q_norm and k_norm over the channels of each head, before the rotary embedding (Qwen3)."""

    q_norm: nn.Module
    k_norm: nn.Module

    def _head_norms(self) -> tuple[Any, ...]:
        return self.q_norm, self.k_norm

    def _before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim))
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim))
        return q.view(-1, self.q_size), k.view(-1, self.kv_size)
