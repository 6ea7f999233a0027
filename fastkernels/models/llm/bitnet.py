"""BitNet b1.58 (arXiv 2402.17764, 2504.12285): ternary weights, squared ReLU, norms before both output projections."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm(eps=config.rms_norm_eps), bool(config.attention_bias)
    mlp = d.Mlp(config.intermediate_size, d.activation(config), inner_norm=norm)
    attention = d.attention(config, bias=bias, out_bias=bias, out_norm=norm)
    layer = d.Layer(attention, mlp, before_attention=norm, before_mlp=norm)
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("BitNetForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="bitnet",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "microsoft/bitnet-b1.58-2B-4T": {
            "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20,
            "num_key_value_heads": 5, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
