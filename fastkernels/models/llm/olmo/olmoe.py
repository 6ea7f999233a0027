"""OLMoE (arXiv 2409.02060): a mixture of experts with norms over all query and all key heads."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, clip_qkv=None, hidden_act="silu")
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    experts = d.Experts(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, config.norm_topk_prob
    )
    attention = d.attention(config, bias=bias, out_bias=bias, wide_norm=norm)
    layer = d.Layer(attention, experts, before_attention=norm, before_mlp=norm)
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("OlmoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="olmoe",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
)  # fmt: skip
