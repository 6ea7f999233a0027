"""GLM-4 (arXiv 2406.12793): Llama with an interleaved rotary embedding of half of each head."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, partial=True, bias=config.attention_bias, interleaved=True)


ARCH = Architecture(
    names=("GlmForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
