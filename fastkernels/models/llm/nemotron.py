"""Nemotron-4 and Minitron (arXiv 2402.16819): LayerNorm with weight + 1, squared ReLU, no gate."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm("layer_1p", config.norm_eps, bias=True), config.attention_bias
    mlp = d.Mlp(config.intermediate_size, d.activation(config), gated=False, bias=config.mlp_bias)
    layer = d.Layer(
        d.attention(config, partial=True, bias=bias, out_bias=bias),
        mlp,
        before_attention=norm,
        before_mlp=norm,
    )
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("NemotronForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="nemotron",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
