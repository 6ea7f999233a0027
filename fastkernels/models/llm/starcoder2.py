"""StarCoder2 (arXiv 2402.19173): LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm("layer", config.norm_epsilon, bias=True), config.use_bias
    mlp = d.Mlp(config.intermediate_size, d.activation(config), gated=False, bias=bias)
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=bias, out_bias=bias), mlp, before_attention=norm, before_mlp=norm
        )
        for window in d.one_window(config)
    )
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Starcoder2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="starcoder2",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    parts={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
)  # fmt: skip
