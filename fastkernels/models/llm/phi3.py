"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama whose projections are packed in the checkpoint."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, d.one_window(config), partial=True)


ARCH = Architecture(
    names=("Phi3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="phi3",
    packed={},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "microsoft/Phi-4": {
            "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
            "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
            "max_position_embeddings": 16384, "rms_norm_eps": 1e-05, "pad_token_id": 100349,
        },
    },
)  # fmt: skip
