"""Code World Model (Meta, arXiv 2510.02387): Llama 3 with a window in three of four layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, d.windows(config))


ARCH = Architecture(
    names=("CwmForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="cwm",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "facebook/cwm": {
            "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
            "sliding_window": 8192,
        },
    },
)  # fmt: skip
