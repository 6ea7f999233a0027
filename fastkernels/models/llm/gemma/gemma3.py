"""Gemma 3 (arXiv 2503.19786), text only: head norms, a window in five of six layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_bidirectional_attention=False, attn_logit_softcapping=None)
    norm = d.Norm("gemma", config.rms_norm_eps)
    layers = tuple(
        d.Layer(
            d.attention(
                config,
                window,
                bias=config.attention_bias,
                out_bias=config.attention_bias,
                scale=config.query_pre_attn_scalar**-0.5,
                head_norm=norm,
                rope=d.rope(config, config.layer_types[i]),
            ),
            d.Mlp(config.intermediate_size, d.activation(config, "hidden_activation")),
            before_attention=norm,
            after_attention=norm,
            before_mlp=norm,
            after_mlp=norm,
            names={
                "after_attention": "post_attention_layernorm",
                "after_mlp": "post_feedforward_layernorm",
                "before_mlp": "pre_feedforward_layernorm",
            },
        )
        for i, window in enumerate(d.windows(config))
    )
    return d.Decoder(
        config.vocab_size,
        config.hidden_size,
        layers,
        norm,
        config.tie_word_embeddings,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=config.final_logit_softcapping or 0.0,
    )


ARCH = Architecture(
    names=("Gemma3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gemma3_text",
    text_of=("Gemma3ForConditionalGeneration",),
    prefixes={
        "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    },
    unused=(
        "*rotary_emb.inv_freq", "vision_tower.*", "model.vision_tower.*", "multi_modal_projector.*",
        "model.multi_modal_projector.*",
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "google/gemma-3-4b": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "tie_word_embeddings": True,
        },
        "google/gemma-3-12b": {
            "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
