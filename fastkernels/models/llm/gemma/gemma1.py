"""Gemma (arXiv 2403.08295): Llama with GELU, norms of weight + 1, and a scaled embedding."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_bidirectional_attention=False, hidden_activation=config.hidden_act)
    norm = d.Norm("gemma", config.rms_norm_eps)
    layer = d.Layer(
        d.attention(config, bias=config.attention_bias, out_bias=config.attention_bias),
        d.Mlp(config.intermediate_size, d.activation(config)),
        before_attention=norm,
        before_mlp=norm,
    )
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(
        config.vocab_size,
        config.hidden_size,
        layers,
        norm,
        config.tie_word_embeddings,
        embedding_scale=config.hidden_size**0.5,
    )


ARCH = Architecture(
    names=("GemmaForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gemma",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
