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
    public={
        "moonshotai/Kimi-Linear-48B-A3B": {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 72, "vocab_size": 163840, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
            "rms_norm_eps": 1e-5, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
            "moe_intermediate_size": 1024, "moe_renormalize": True, "routed_scaling_factor": 2.446,
            "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "model_max_length": 1048576,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
            },
        },
    },
)  # fmt: skip
