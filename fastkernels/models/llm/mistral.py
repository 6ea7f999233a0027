"""Mistral (arXiv 2310.06825): Llama, in some checkpoints with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config)


ARCH = Architecture(
    names=("MistralForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mistral",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
