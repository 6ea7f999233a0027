"""GLM-5 (Zhipu): DeepSeek-V3.2's sparse attention with other sizes; layers may share the keys of the one before."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    kinds = config.indexer_types
    if len(kinds) != config.num_hidden_layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise d.Unsupported(
            f"config.indexer_types={kinds!r} is not supported, only 'full' or 'shared' for each of"
            f" {config.num_hidden_layers} layers, the first 'full'"
        )
    indexers = [d.indexer(config, interleaved=True, shared=kind == "shared") for kind in kinds]
    return d.latent_decoder(config, d.sigmoid_experts(config), d.dense_layers(config), indexers)


ARCH = Architecture(
    names=("GlmMoeDsaForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm_moe_dsa",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "zai-org/GLM-5": {
            "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 2048,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "num_nextn_predict_layers": 1,
            "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
)  # fmt: skip
