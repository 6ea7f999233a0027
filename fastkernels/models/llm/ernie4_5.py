"""ERNIE 4.5 (Baidu), dense: Llama with an interleaved rotary embedding."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    layer = d.Layer(
        d.attention(config, bias=config.use_bias, out_bias=config.use_bias, interleaved=True),
        d.Mlp(config.intermediate_size, d.activation(config), bias=config.use_bias),
        before_attention=norm,
        before_mlp=norm,
    )
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Ernie4_5ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="ernie4_5",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
