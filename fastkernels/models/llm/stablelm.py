"""StableLM 2 (arXiv 2402.17834): LayerNorm and rotary embedding of a part of each head."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, qk_layernorm=False, head_dim=config.hidden_size // config.num_attention_heads)
    norm = d.Norm("layer", config.layer_norm_eps, bias=True)
    layer = d.Layer(
        d.attention(config, partial=True, bias=config.use_qkv_bias),
        d.Mlp(config.intermediate_size, d.activation(config)),
        before_attention=norm, before_mlp=None if config.use_parallel_residual else norm,
        parallel=config.use_parallel_residual,
    )  # fmt: skip
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("StableLmForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="stablelm",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
