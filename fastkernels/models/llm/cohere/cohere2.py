"""Command R7B (Cohere 2): attention and MLP in parallel, and positions only in layers with a window."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm("layer", config.layer_norm_eps), config.attention_bias
    mlp = d.Mlp(config.intermediate_size, d.activation(config))
    layers = tuple(
        d.Layer(
            d.attention(
                config, window, bias=bias, out_bias=bias, interleaved=True,
                rope=None if window is None else d.rope(config),
            ),
            mlp, before_attention=norm, parallel=True,
        )
        for window in d.windows(config)
    )  # fmt: skip
    return d.Decoder(
        config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings,
        logits_scale=config.logit_scale,
    )  # fmt: skip


ARCH = Architecture(
    names=("Cohere2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="cohere2",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
