"""Mistral (arXiv 2310.06825): Llama, in some checkpoints with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, d.one_window(config))


ARCH = Architecture(
    names=("MistralForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mistral",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "mistralai/Mistral-Small-24B-2501": {
            "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072,
            "max_position_embeddings": 32768, "head_dim": 128, "rms_norm_eps": 1e-05,
            "sliding_window": None,
        },
    },
)  # fmt: skip
