"""GLM-4.5 and 4.6 (Zhipu, arXiv 2508.06471): DeepSeek-V3's experts with grouped-query attention."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    attention = d.attention(
        config, partial=True, bias=config.attention_bias, head_norm=norm if config.use_qk_norm else None
    )
    dense, experts = d.Mlp(config.intermediate_size, d.activation(config)), d.sigmoid_experts(config)
    layers = tuple(
        d.Layer(
            attention, dense if i < config.first_k_dense_replace else experts, before_attention=norm, before_mlp=norm
        )
        for i in range(config.num_hidden_layers)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Glm4MoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm4_moe",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    public={
        "zai-org/GLM-4.5-Air": {
            "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1, "attention_bias": True, "num_nextn_predict_layers": 1,
        },
    },
)  # fmt: skip
