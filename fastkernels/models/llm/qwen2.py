"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of the query, key and value projections."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(config, bias=True)


ARCH = Architecture(
    names=("Qwen2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen2",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
