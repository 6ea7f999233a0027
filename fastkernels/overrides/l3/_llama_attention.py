"""The attention block of a Llama layer, as vLLM and SGLang build it: projections, rotary embedding, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1.rotary_emb import get_rope
from fastkernels.overrides.l2.attention import AttentionType, SGLangRadixAttention, VllmAttention
from fastkernels.overrides.l2.parallel_linear import (
    SGLangQKVParallelLinear,
    SGLangRowParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary parameters of a Hugging Face config: rope_parameters (transformers 5), else theta and scaling."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        return dict(found)
    p = dict(getattr(config, "rope_scaling", None) or {})
    p.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    partial = getattr(config, "partial_rotary_factor", None)
    if partial is not None:
        p.setdefault("partial_rotary_factor", partial)
    return p


def head_size(config: Any) -> int:
    """head_dim of a Hugging Face config, hidden_size / num_attention_heads where it has none."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: Any, prefix: str) -> int | None:
    """The window of the layer that `prefix` ('model.layers.3.self_attn') names, None for full attention."""
    types = getattr(config, "layer_types", None)
    numbers = [int(part) for part in prefix.split(".") if part.isdigit()]
    if not types or not numbers or types[numbers[0]] != "sliding_attention":
        return None
    return config.sliding_window


class SelfAttention(nn.Module):
    """What the hosts' blocks share: positions [T], hidden_states [T, H] to [T, H], with this rank's heads."""

    qkv_proj: Any
    rotary_emb: Any
    attn: Any
    o_proj: Any
    head_dim: int

    def _split_heads(self) -> None:
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def _before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [T, q_size], k: [T, kv_size]; models that normalize queries and keys do it here."""
        return q, k

    def _attend(self, positions: torch.Tensor, hidden_states: torch.Tensor, *batch: Any) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, *self._before_rope(q, k))
        out, _ = self.o_proj(self.attn(q, k, v, *batch))
        return out


class HeadNorms(SelfAttention):
    """With q_norm and k_norm over the head_dim channels of each head, before the rotary embedding (Qwen3)."""

    q_norm: nn.Module
    k_norm: nn.Module

    def _before_rope(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.q_norm(q.view(-1, self.num_heads, self.head_dim))
        k = self.k_norm(k.view(-1, self.num_kv_heads, self.head_dim))
        return q.view(-1, self.q_size), k.view(-1, self.kv_size)


class LlamaAttention(SelfAttention):
    """vllm.model_executor.models.llama.LlamaAttention: positions [T], hidden_states [T, H] to [T, H]."""

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int = 8192,
        quant_config: Any = None,
        bias: bool = False,
        bias_o_proj: bool = False,
        cache_config: Any = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__()
        size = head_size(config)
        self.hidden_size, self.head_dim = hidden_size, size
        self.qkv_proj = VllmQKVParallelLinear(
            hidden_size, size, num_heads, num_kv_heads, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = VllmRowParallelLinear(
            num_heads * size,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(size, max_position_embeddings, True, rope_parameters(config))
        self._split_heads()
        self.attn = VllmAttention(
            self.num_heads, size, size**-0.5, num_kv_heads=self.num_kv_heads, cache_config=cache_config,
            quant_config=quant_config, per_layer_sliding_window=sliding_window(config, prefix), attn_type=attn_type,
            prefix=f"{prefix}.attn",
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._attend(positions, hidden_states)


class SGLangLlamaAttention(SelfAttention):
    """sglang.srt.models.llama.LlamaAttention, with the arguments that its layer gives; see LlamaAttention."""

    def __init__(
        self, config: Any, layer_id: int = 0, quant_config: Any = None, prefix: str = "", bias: bool = False
    ) -> None:
        super().__init__()
        size, heads = head_size(config), config.num_attention_heads
        self.hidden_size, self.head_dim = config.hidden_size, size
        self.qkv_proj = SGLangQKVParallelLinear(
            config.hidden_size, size, heads, config.num_key_value_heads, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = SGLangRowParallelLinear(
            heads * size, config.hidden_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        neox = getattr(config, "rope_is_neox_style", True)
        positions = getattr(config, "max_position_embeddings", 8192)
        self.rotary_emb = get_rope(size, positions, neox, rope_parameters(config))
        self._split_heads()
        self.attn = SGLangRadixAttention(
            self.num_heads, size, size**-0.5, self.num_kv_heads, layer_id, prefix=f"{prefix}.attn"
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        return self._attend(positions, hidden_states, forward_batch)
