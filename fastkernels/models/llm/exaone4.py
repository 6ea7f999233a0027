"""EXAONE 4.0 (arXiv 2507.11407): norms behind attention and MLP; with windows, only their layers have positions."""

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
                head_norm=norm,
                rope=d.rope(config) if window is not None or config.sliding_window is None else None,
            ),
            d.Mlp(config.intermediate_size, d.activation(config)),
            after_attention=norm,
            after_mlp=norm,
            names={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
        )
        for window in d.windows(config)
    )
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Exaone4ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="exaone4",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
