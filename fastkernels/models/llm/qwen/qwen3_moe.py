"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts in some or all layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    dense = d.Mlp(config.intermediate_size, d.activation(config))
    experts = d.Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    )
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=bias, out_bias=bias, head_norm=norm),
            experts if is_sparse(config, i) else dense, before_attention=norm, before_mlp=norm,
        )
        for i, window in enumerate(d.one_window(config))
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


def is_sparse(config: Any, layer: int) -> bool:
    """Whether this layer has experts."""
    dense = config.mlp_only_layers or []
    return layer not in dense and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0


ARCH = Architecture(
    names=("Qwen3MoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen3_moe",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
)  # fmt: skip
