"""Qwen3 (arXiv 2505.09388): Llama with a norm of each query and key head, and an independent head_dim."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    bias, norm = config.attention_bias, d.Norm(eps=config.rms_norm_eps)
    return d.llama(config, d.windows(config), bias=bias, out_bias=bias, head_norm=norm)


ARCH = Architecture(
    names=("Qwen3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen3",
    layers=("qwen3_decoder_layer",),

    tied={"lm_head.weight": "model.embed_tokens.weight"},
    config_fields=("head_dim",),
    config_defaults={
        "eos_token_id": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "use_sliding_window": False,
    },
    fast_tokenizer=True,
    public={
        "Qwen/Qwen3-0.6B": {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        "Qwen/Qwen3-8B": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
        },
        "Qwen/Qwen3-32B": {
            "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
        },
        "Qwen/Qwen3-4B": {
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
            "max_position_embeddings": 40960, "head_dim": 128, "tie_word_embeddings": True,
        },
        "Qwen/Qwen3-14B": {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 151936,
            "max_position_embeddings": 40960, "head_dim": 128,
        },
    },
)  # fmt: skip
