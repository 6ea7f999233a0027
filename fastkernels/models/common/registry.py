"""Architectures by the name that a checkpoint's config.json gives them; imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

from fastkernels.core.registry import UnknownName

ARCHITECTURES = {
    "LlamaForCausalLM": "fastkernels.models.llm.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "fastkernels.models.llm.qwen3:Qwen3ForCausalLM",
    "MixtralForCausalLM": "fastkernels.models.llm.mixtral:MixtralForCausalLM",
}


def architectures() -> list[str]:
    return sorted(ARCHITECTURES)


def model_class(architecture: str) -> Any:
    """The model class of an architecture. Raises UnknownName, which lists the ones that exist."""
    if architecture not in ARCHITECTURES:
        raise UnknownName("architecture", architecture, ARCHITECTURES)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)
