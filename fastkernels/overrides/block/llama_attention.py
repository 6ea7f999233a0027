"""The attention block of a Llama layer, as vLLM and SGLang build it: projections, rotary embedding, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastkernels.core.forward_context import get_forward_context
from fastkernels.overrides.attention.attention import AttentionType, SGLangRadixAttention, VllmAttention
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.overrides.linear.parallel_linear import (
    SGLangQKVParallelLinear,
    SGLangRowParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.vllm import VllmRMSNorm
from fastkernels.overrides.rope.rope_store_kvcache import rope_store_kvcache
from fastkernels.overrides.rope.rotary_emb import (
    VllmLlama3RotaryEmbedding,
    VllmRotaryEmbedding,
    get_rope,
    rotary_emb,
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

    def _head_norms(self) -> tuple[Any, ...]:
        """The modules of `_before_rope`: none, or the norms of query heads and of key heads."""
        return ()

    def _attend(self, positions: torch.Tensor, hidden_states: torch.Tensor, *batch: Any) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if not batch and not torch.compiler.is_compiling() and self._fuses(qkv):
            self._rope_and_store(positions, q, k, v)
            k = v = None
        else:
            q, k = self.rotary_emb(positions, *self._before_rope(q, k))
        out, _ = self.o_proj(self.attn(q, k, v, *batch))
        return out

    def _fuses(self, qkv: torch.Tensor) -> bool:
        """Whether one launch does what the norms, rotary_emb and store_kvcache would: on a GPU, or where somebody asks
        for it by name, if all of those are ours and nobody has asked for one of them by name.
        """
        norms, apart = self._head_norms(), (rotary_emb, store_kvcache)
        return (
            rope_store_kvcache.asked != "off"
            and (qkv.is_cuda or rope_store_kvcache.asked == "named")
            and not any(op.asked for op in ((*apart, rms_norm) if norms else apart))
            and type(self.rotary_emb) in (VllmRotaryEmbedding, VllmLlama3RotaryEmbedding)
            and type(self.attn) is VllmAttention
            and self.attn.kv_cache is not None
            and all(type(norm) is VllmRMSNorm and norm.variance_size_override is None for norm in norms)
            and len({norm.variance_epsilon for norm in norms}) <= 1
        )

    def _rope_and_store(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """q becomes what `attn` takes; keys and values go into its cache."""
        by_head, rope, attn = (-1, self.head_dim), self.rotary_emb, self.attn
        norms = self._head_norms()
        weights = [norm.weight for norm in norms] or [None, None]
        rope_store_kvcache(
            positions, q.unflatten(-1, by_head), k.unflatten(-1, by_head), v.unflatten(-1, by_head), *attn.kv_cache,
            get_forward_context().slot_mapping, rope.cos_sin_cache, rope.is_neox_style, *weights,
            norms[0].variance_epsilon if norms else 1e-6, attn.k_scale, attn.v_scale,
        )  # fmt: skip


class HeadNorms(SelfAttention):
    """With q_norm and k_norm over the head_dim channels of each head, before the rotary embedding (Qwen3)."""

    q_norm: nn.Module
    k_norm: nn.Module

    def _head_norms(self) -> tuple[Any, ...]:
        return self.q_norm, self.k_norm

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
