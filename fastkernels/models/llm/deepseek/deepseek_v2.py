"""DeepSeek-V2 (arXiv 2405.04434) and V2-Lite: latent attention, softmax routing, shared experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

METHODS = ("greedy", "group_limited_greedy")


def describe(config: Any) -> d.Decoder:
    d.refuse(
        config, hidden_act="silu", moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False
    )  # fmt: skip
    method = config.topk_method or "greedy"
    if method not in METHODS:
        raise d.Unsupported(f"config.topk_method={method!r} is not supported, only {', '.join(METHODS)}")
    grouped = method == "group_limited_greedy"
    experts = d.Experts(
        config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, normalize=False,
        groups=config.n_group if grouped else 1, top_groups=config.topk_group if grouped else 1,
        scale=config.routed_scaling_factor, shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )  # fmt: skip
    return d.latent_decoder(config, experts)


ARCH = Architecture(
    names=("DeepseekV2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="deepseek_v2",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "deepseek-ai/DeepSeek-V2-Lite": {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 163840, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
            "scoring_func": "softmax", "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
            },
        },
    },
)  # fmt: skip
