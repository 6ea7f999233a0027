"""Command R (Cohere): attention and MLP in parallel, LayerNorm without bias, interleaved rotary embedding."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_qk_norm=False)
    norm = d.Norm("layer", config.layer_norm_eps)
    layer = d.Layer(
        d.attention(config, bias=config.attention_bias, out_bias=config.attention_bias, interleaved=True),
        d.Mlp(config.intermediate_size, d.activation(config)),
        before_attention=norm,
        parallel=True,
    )
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(
        config.vocab_size,
        config.hidden_size,
        layers,
        norm,
        config.tie_word_embeddings,
        logits_scale=config.logit_scale,
    )


ARCH = Architecture(
    names=("CohereForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="cohere",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
