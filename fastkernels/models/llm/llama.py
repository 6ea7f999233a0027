"""Llama (Touvron et al., arXiv 2302.13971), Llama 2 and 3, SmolLM2."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    bias = config.attention_bias
    return d.llama(config, mlp_bias=config.mlp_bias, bias=bias, out_bias=bias)


ARCH = Architecture(
    names=("LlamaForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="llama",
    layers=("llama_decoder_layer",),

    tied={"lm_head.weight": "model.embed_tokens.weight"},
    config_fields=(),
    config_defaults={"eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    fast_tokenizer=True,
    public={
        "meta-llama/Llama-3.1-8B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        },
        "meta-llama/Llama-3.1-70B": {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        },
        "meta-llama/Llama-3.2-1B": {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        "meta-llama/Llama-3.2-3B": {
            "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "head_dim": 128, "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
