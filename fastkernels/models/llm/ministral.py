"""Ministral (Mistral AI): Llama with a sliding window in some or all layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, d.windows(config))


ARCH = Architecture(
    names=("MinistralForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="ministral",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
