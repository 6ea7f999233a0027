"""OLMo-2 (arXiv 2501.00656): norms behind attention and MLP, and over all query and all key heads."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    attention = d.attention(
        config, bias=config.attention_bias, out_bias=config.attention_bias, wide_norm=norm
    )
    layer = d.Layer(
        attention, d.Mlp(config.intermediate_size, d.activation(config)), after_attention=norm, after_mlp=norm,
        names={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    )  # fmt: skip
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Olmo2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="olmo2",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "allenai/OLMo-2-1124-7B": {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
        },
    },
)  # fmt: skip
