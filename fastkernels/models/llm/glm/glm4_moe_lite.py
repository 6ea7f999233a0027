"""GLM-4.7-Flash (Zhipu): DeepSeek-V3's attention and experts with other sizes."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.latent_decoder(
        config, d.sigmoid_experts(config), d.dense_layers(config), interleaved=config.rope_interleave
    )


ARCH = Architecture(
    names=("Glm4MoeLiteForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm4_moe_lite",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    public={
        "zai-org/GLM-4.7-Flash": {
            "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
            "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752, "n_routed_experts": 64, "n_shared_experts": 1,
            "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64, "v_head_dim": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
)  # fmt: skip
