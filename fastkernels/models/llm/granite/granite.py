"""Granite 3 (IBM): Llama with multipliers of embedding, attention scores, residual and logits."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    attention = d.attention(config, bias=bias, out_bias=bias, scale=config.attention_multiplier)
    mlp = d.Mlp(config.intermediate_size, d.activation(config), bias=config.mlp_bias)
    layer = d.Layer(
        attention, mlp, before_attention=norm, before_mlp=norm, multiplier=config.residual_multiplier
    )
    return d.Decoder(
        config.vocab_size, config.hidden_size, (layer,) * config.num_hidden_layers, norm, config.tie_word_embeddings,
        embedding_scale=config.embedding_multiplier, logits_scale=1 / config.logits_scaling,
    )  # fmt: skip


ARCH = Architecture(
    names=("GraniteForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="granite",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "ibm-granite/granite-3.3-8b": {
            "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": True,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0,
        },
    },
)  # fmt: skip
