"""GPT-NeoX (arXiv 2204.06745) and Pythia: LayerNorm, attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, head_dim=config.hidden_size // config.num_attention_heads)
    norm, bias = d.Norm("layer", config.layer_norm_eps, bias=True), config.attention_bias
    layer = d.Layer(
        d.attention(
            config, partial=True, kv_heads=config.num_attention_heads, bias=bias, out_bias=bias, by_head=True
        ),
        d.Mlp(config.intermediate_size, d.activation(config), gated=False, bias=True),
        before_attention=norm, before_mlp=norm, parallel=config.use_parallel_residual,
    )  # fmt: skip
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("GPTNeoXForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gpt_neox",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    renamed={
        "gpt_neox.embed_in.": "model.embed_tokens.", "gpt_neox.final_layer_norm.": "model.norm.",
        "gpt_neox.": "model.", "embed_out.": "lm_head.",
    },
    parts={
        "attention.query_key_value": "self_attn.qkv_proj", "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    packed={},
    unused=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
)  # fmt: skip
