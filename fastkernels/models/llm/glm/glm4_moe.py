"""GLM-4.5 and 4.6 (Zhipu, arXiv 2508.06471): DeepSeek-V3's experts with grouped-query attention."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    attention = d.attention(
        config, bias=config.attention_bias, head_norm=norm if config.use_qk_norm else None
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
    experts="fastkernels.models.common.decoder:expert_mapping",
)
