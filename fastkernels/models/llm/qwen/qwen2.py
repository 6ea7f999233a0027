"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of the query, key and value projections."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, d.windows(config), bias=True)


ARCH = Architecture(
    names=("Qwen2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen2",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "Qwen/Qwen2.5-0.5B": {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "max_position_embeddings": 32768, "tie_word_embeddings": True,
        },
        "Qwen/Qwen2.5-7B": {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
        "Qwen/Qwen2.5-14B": {
            "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
        "Qwen/Qwen2.5-32B": {
            "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
            "max_position_embeddings": 131072,
        },
    },
)  # fmt: skip
