"""Gemma 2 (arXiv 2408.00118): norms on both sides, soft caps, windows in every other layer."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_bidirectional_attention=False)
    norm, bias = d.Norm("gemma", config.rms_norm_eps), config.attention_bias
    mlp = d.Mlp(config.intermediate_size, d.activation(config, "hidden_activation"))
    layers = tuple(
        d.Layer(
            d.attention(
                config, window, bias=bias, out_bias=bias, scale=config.query_pre_attn_scalar**-0.5,
                softcap=config.attn_logit_softcapping or 0.0,
            ),
            mlp, norm, norm, norm, norm,
            names={
                "after_attention": "post_attention_layernorm", "before_mlp": "pre_feedforward_layernorm",
                "after_mlp": "post_feedforward_layernorm",
            },
        )
        for window in d.windows(config)
    )  # fmt: skip
    return d.Decoder(
        config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings,
        embedding_scale=config.hidden_size**0.5, logits_softcap=config.final_logit_softcapping or 0.0,
    )  # fmt: skip


ARCH = Architecture(
    names=("Gemma2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gemma2",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "google/gemma-2-9b": {
            "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000,
            "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
