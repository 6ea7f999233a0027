"""Gemma 4 12B, text only: Gemma 4 without inputs of layers and experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.llm.gemma import gemma4


def describe(config: Any) -> d.Decoder:
    return gemma4.decoder(config, size=0, experts=None)


ARCH = Architecture(
    names=("Gemma4UnifiedForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gemma4_unified_text",
    text_of=("Gemma4UnifiedForConditionalGeneration",),
    prefixes={"model.language_model.": "model."},
    unused=("*rotary_emb.inv_freq", "model.vision_*", "model.embed_vision.*", "model.embed_audio.*"),
    absent="fastkernels.models.llm.gemma.gemma4:own_values",
    unneeded="fastkernels.models.llm.gemma.gemma4:shared_keys",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
