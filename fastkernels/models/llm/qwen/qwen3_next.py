"""Qwen3-Next: three layers of the gated delta rule for each one of gated attention, and experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.llm.qwen.qwen3_moe import is_sparse


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm, bias = d.Norm("gemma", config.rms_norm_eps), config.attention_bias
    attention = d.attention(config, partial=True, bias=bias, out_bias=bias, head_norm=norm, gated=True)
    linear = d.GatedDelta(
        config.linear_conv_kernel_dim, key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads, key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim, norm=d.Norm(eps=config.rms_norm_eps),
    )  # fmt: skip
    dense = d.Mlp(config.intermediate_size, d.activation(config))
    experts = d.Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob,
        shared=config.shared_expert_intermediate_size, shared_gate=True,
    )  # fmt: skip
    layers = tuple(
        d.Layer(
            attention if kind == "full_attention" else linear, experts if is_sparse(config, i) else dense,
            before_attention=norm, before_mlp=norm,
            names={} if kind == "full_attention" else {"self_attn": "linear_attn"},
        )
        for i, kind in enumerate(config.layer_types)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Qwen3NextForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen3_next",
    packed={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj": ("in_proj_qkvz", "in_proj_ba"),
    },
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    unused=("*rotary_emb.inv_freq", "mtp.*"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    head="Qwen3NextMTP",
    parts={
        "A_log": "A",
        "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
    },
    public={
        "Qwen/Qwen3-Next-80B-A3B": {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "max_position_embeddings": 262144,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    },
)  # fmt: skip
