"""Jamba (arXiv 2403.19887): Mamba layers and a few of attention without positions, with experts in some layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm = d.Norm(eps=config.rms_norm_eps)
    mamba = d.Mamba(
        config.mamba_d_conv, inner=config.mamba_expand * config.hidden_size, size=config.mamba_d_state,
        rank=config.mamba_dt_rank, conv_bias=config.mamba_conv_bias, bias=config.mamba_proj_bias, part_norm=norm,
    )  # fmt: skip
    attention = d.attention(config, rope=None)
    mlp = d.Mlp(config.intermediate_size, d.activation(config))
    experts = d.Experts(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, normalize=False
    )
    names = {"mlp": "feed_forward", "before_mlp": "pre_ff_layernorm"}
    kinds = zip(config.layers_block_type, config.layers_num_experts, strict=True)
    layers = tuple(
        d.Layer(
            attention if kind == "attention" else mamba, experts if count > 1 else mlp, before_attention=norm,
            before_mlp=norm, names=names if kind == "attention" else {"self_attn": "mamba", **names},
        )
        for kind, count in kinds
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("JambaForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="jamba",
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    renamed={"model.final_layernorm.": "model.norm."},
    parts={"A_log": "A", "feed_forward.router": "feed_forward.gate"},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "ai21labs/Jamba-v0.1": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 65536, "num_experts": 16, "num_experts_per_tok": 2,
            "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "rms_norm_eps": 1e-6,
        },
    },
)  # fmt: skip
