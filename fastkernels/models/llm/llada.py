"""LLaDA (arXiv 2502.09992): a Llama whose tokens see all others, and which fills in masks in any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

# Fields of a config.json with the defaults of the checkpoint's own code
DEFAULTS: dict[str, Any] = {
    "d_model": 768, "n_heads": 12, "n_kv_heads": None, "n_layers": 12, "mlp_hidden_size": None,
    "activation_type": "swiglu", "block_type": "sequential", "alibi": False, "rope": False,
    "attention_layer_norm": False, "input_emb_norm": False, "layer_norm_type": "default",
    "layer_norm_with_affine": True, "rms_norm_eps": 1e-5, "max_sequence_length": 1024, "rope_theta": 10000.0,
    "include_qkv_bias": False, "include_bias": False, "bias_for_layer_norm": None, "scale_logits": False,
    "vocab_size": 50257, "embedding_size": 50304, "weight_tying": True, "eos_token_id": 50256,
    "mask_token_id": 50256, "multi_query_attention": None, "block_group_size": 1, "clip_qkv": None,
}  # fmt: skip


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, those of its sizes also under transformers' names."""
    made = {**DEFAULTS, **raw}
    kv_heads = 1 if made["multi_query_attention"] and made["n_kv_heads"] is None else made["n_kv_heads"]
    return {
        **made, "hidden_size": made["d_model"], "num_attention_heads": made["n_heads"],
        "num_key_value_heads": made["n_heads"] if kv_heads is None else kv_heads,
        "num_hidden_layers": made["n_layers"], "max_position_embeddings": made["max_sequence_length"],
        "intermediate_size": made["mlp_hidden_size"],
        "tie_word_embeddings": made["weight_tying"],
    }  # fmt: skip


def describe(config: Any) -> d.Decoder:
    d.refuse(
        config, block_type="llama", layer_norm_type="rms", activation_type="silu", rope=True, alibi=False,
        attention_layer_norm=False, input_emb_norm=False, layer_norm_with_affine=True, scale_logits=False,
        include_bias=False, bias_for_layer_norm=False, embedding_size=config.vocab_size, block_group_size=1,
        clip_qkv=None,
    )  # fmt: skip
    mask = config.mask_token_id
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        raise d.Unsupported(
            f"config.mask_token_id={mask!r} is not supported, only tokens of the vocabulary of {config.vocab_size}"
        )
    norm = d.Norm(eps=config.rms_norm_eps)
    attention = d.Attention(
        config.num_attention_heads, config.num_key_value_heads, d.head_size(config),
        bias=bool(config.include_qkv_bias), rope={"rope_type": "default", "rope_theta": config.rope_theta},
        max_positions=config.max_position_embeddings, causal=False,
    )  # fmt: skip
    layer = d.Layer(attention, d.Mlp(config.intermediate_size), before_attention=norm, before_mlp=norm)
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, bool(config.tie_word_embeddings))


ARCH = Architecture(
    names=("LLaDAModelLM",),
    category="llm",
    runner="Unmask",
    model_type="llada",
    renamed={
        "model.transformer.wte.": "model.embed_tokens.", "model.transformer.ln_f.": "model.norm.",
        "model.transformer.ff_out.": "lm_head.", "model.transformer.blocks.": "model.layers.",
    },
    parts={
        "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj", "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    sizes={
        "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_sequence_length", "intermediate_size": "mlp_hidden_size",
    },
    own_config="fastkernels.models.llm.llada:fields",
    fast_tokenizer=True,
    public={
        "GSAI-ML/LLaDA-8B-Instruct": {
            "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288,
            "activation_type": "silu", "block_type": "llama", "rope": True, "layer_norm_type": "rms",
            "max_sequence_length": 4096, "rope_theta": 500000.0, "vocab_size": 126464, "embedding_size": 126464,
            "weight_tying": False, "eos_token_id": 126081, "mask_token_id": 126336,
        },
    },
)  # fmt: skip
