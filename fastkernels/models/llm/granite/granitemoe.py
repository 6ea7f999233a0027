"""Granite 3 MoE (IBM): Granite with experts, all in one tensor of the checkpoint."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return decoder(config, shared=0)


def decoder(config: Any, shared: int) -> d.Decoder:
    """shared: intermediate size of the shared expert; 0: none"""
    d.refuse(config, hidden_act="silu")
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    experts = d.Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size,
        shared=shared,
    )  # fmt: skip
    layer = d.Layer(
        d.attention(config, bias=bias, out_bias=bias, scale=config.attention_multiplier),
        experts, before_attention=norm, before_mlp=norm, multiplier=config.residual_multiplier,
        names={"mlp": "block_sparse_moe"},
    )  # fmt: skip
    return d.Decoder(
        config.vocab_size, config.hidden_size, (layer,) * config.num_hidden_layers, norm, config.tie_word_embeddings,
        embedding_scale=config.embedding_multiplier, logits_scale=1 / config.logits_scaling,
    )  # fmt: skip


ARCH = Architecture(
    names=("GraniteMoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="granitemoe",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    parts={
        "block_sparse_moe.router.layer": "block_sparse_moe.gate",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.w13_weight",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.w2_weight",
    },
)
