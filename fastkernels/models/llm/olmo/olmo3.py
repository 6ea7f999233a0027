"""OLMo-3 (Ai2): OLMo-2 with a window in three of four layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    layers = tuple(
        d.Layer(
            d.attention(
                config,
                window,
                bias=config.attention_bias,
                out_bias=config.attention_bias,
                wide_norm=norm,
                rope=d.rope(config, config.layer_types[i]),
            ),
            d.Mlp(config.intermediate_size, d.activation(config)),
            after_attention=norm,
            after_mlp=norm,
            names={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
        )
        for i, window in enumerate(d.windows(config))
    )
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Olmo3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="olmo3",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
