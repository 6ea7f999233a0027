"""Kimi Linear (arXiv 2510.26692): the delta rule with a decay for each channel, latent attention without positions."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu", mla_use_nope=True)
    norm = d.Norm(eps=config.rms_norm_eps)
    attention = d.LatentAttention(
        config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim,
        config.qk_rope_head_dim, config.v_head_dim, bias=bool(config.attention_bias),
    )  # fmt: skip
    linear = d.KimiDelta(
        config.linear_conv_kernel_dim, heads=config.linear_num_heads, head_size=config.linear_head_dim, norm=norm
    )  # fmt: skip
    experts = d.Experts(
        config.num_local_experts, config.num_experts_per_tok, config.moe_intermediate_size,
        bool(config.norm_topk_prob), names=d.NUMBERED, scoring="sigmoid", correction=True, groups=config.n_group,
        top_groups=config.topk_group, scale=config.routed_scaling_factor,
        shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )  # fmt: skip
    mlp = d.Mlp(config.intermediate_size, d.activation(config))
    layers = tuple(
        d.Layer(
            attention if kind == "full_attention" else linear, mlp if dense else experts, before_attention=norm,
            before_mlp=norm,
        )
        for kind, dense in zip(config.layer_types, d.dense_layers(config), strict=True)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, bool(config.tie_word_embeddings))


ARCH = Architecture(
    names=("KimiLinearForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="kimi_linear",
    packed={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "fg_a_proj": ("f_a_proj", "g_a_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    },
    experts="fastkernels.models.common.layers.decoder:numbered_expert_mapping",
    parts={"A_log": "A", "block_sparse_moe": "mlp"},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
