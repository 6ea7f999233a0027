"""DeepSeek-V3 and R1 (arXiv 2412.19437), Moonlight, Kimi K2: latent attention, sigmoid routing, shared experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, moe_layer_freq=1)
    return d.latent_decoder(config, d.sigmoid_experts(config), interleaved=config.rope_interleave)


ARCH = Architecture(
    names=("DeepseekV3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    head="DeepSeekMTPModel",
    public={
        "deepseek-ai/DeepSeek-R1": {
            "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 163840, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
        "moonshotai/Moonlight-16B-A3B": {
            "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    },
)  # fmt: skip
