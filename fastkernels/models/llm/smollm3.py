"""SmolLM3 (Hugging Face): Llama without positions in every fourth layer."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    if "sliding_attention" in config.layer_types:
        d.refuse(config, use_sliding_window=True)
    given = config.no_rope_layers[: config.num_hidden_layers]  # 1: with positions
    if len(given) < config.num_hidden_layers:
        raise d.Unsupported(f"config.no_rope_layers has {len(given)} entries, fewer than num_hidden_layers")
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    mlp = d.Mlp(config.intermediate_size, d.activation(config), bias=config.mlp_bias)
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=bias, out_bias=bias, rope=d.rope(config) if positions else None),
            mlp, before_attention=norm, before_mlp=norm,
        )
        for window, positions in zip(d.windows(config), given, strict=True)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("SmolLM3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="smollm3",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
