"""MPT (MosaicML, 2023): LayerNorm without bias, ALiBi instead of positions, no biases at all."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

ALIBI_MAX = 8


def describe(config: Any) -> d.Decoder:
    d.refuse(config, expansion_ratio=4, logit_scale=None, no_bias=True, norm_type="low_precision_layernorm")
    a, heads, norm = config.attn_config, config.n_heads, d.Norm("layer", config.layer_norm_epsilon)
    d.refuse(a, alibi=True, attn_type="multihead_attention", clip_qkv=None, qk_ln=False, prefix_lm=False)
    if a.alibi_bias_max != ALIBI_MAX:
        field = f"attn_config.alibi_bias_max={a.alibi_bias_max!r}"
        raise d.Unsupported(d.ambiguous(config, field, f"computes slopes with {ALIBI_MAX}"))
    layer = d.Layer(
        d.Attention(
            heads, heads, d.head_size(config), scale=a.softmax_scale, max_positions=config.max_seq_len,
            alibi=float(ALIBI_MAX),
        ),
        d.Mlp(4 * config.d_model, "gelu", gated=False),
        before_attention=norm, before_mlp=norm,
    )  # fmt: skip
    layers = (layer,) * config.n_layers
    return d.Decoder(config.vocab_size, config.d_model, layers, norm, bool(config.tie_word_embeddings))


ARCH = Architecture(
    names=("MptForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mpt",
    tied={"lm_head.weight": "transformer.wte.weight"},
    renamed={
        "transformer.wte.": "model.embed_tokens.", "transformer.norm_f.": "model.norm.",
        "transformer.blocks.": "model.layers.",
    },
    parts={
        "attn.Wqkv": "self_attn.qkv_proj", "attn.out_proj": "self_attn.o_proj", "ffn": "mlp",
        "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    },
    packed={},
    unused=(),
    sizes={
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len", "intermediate_size": "", "num_key_value_heads": "",
    },
)  # fmt: skip
