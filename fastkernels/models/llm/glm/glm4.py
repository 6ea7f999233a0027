"""GLM-4-0414 (Zhipu): norms on both sides, and interleaved rotary embedding of half of each head."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    layer = d.Layer(
        d.attention(config, partial=True, bias=config.attention_bias, interleaved=True),
        d.Mlp(config.intermediate_size, d.activation(config)), norm, norm, norm, norm,
        names={"after_attention": "post_self_attn_layernorm", "after_mlp": "post_mlp_layernorm"},
    )  # fmt: skip
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Glm4ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm4",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
