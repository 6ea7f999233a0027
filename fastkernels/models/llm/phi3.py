"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama whose projections are packed in the checkpoint."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config)


ARCH = Architecture(
    names=("Phi3ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="phi3",
    packed={},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
