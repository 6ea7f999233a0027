"""The longest sequence of a model, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.descriptions import registry
from fastkernels.overrides.block import attention_sizes


def longest(config: Any) -> int | None:
    """The model's own limit: max_position_embeddings, or what YaRN extends it to; None if the config has none.

    Positions that ARCH.first_position leaves unused do not count.

    Qwen's recipe for long texts adds YaRN to a config and leaves max_position_embeddings as it was.
    """
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    own = next((found for name in names if (found := getattr(config, name, None))), None)
    known = registry.by_architecture().get((getattr(config, "architectures", None) or [""])[0])
    if own and known is not None and known.arch.first_position:
        own -= (getattr(config, known.arch.first_position, None) or 0) + 1
    for rope in _ropes(config):
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if own and rope.get("rope_type", rope.get("type")) == "yarn" and factor and original:
            own = max(own, int(factor * original))
    return own


def notice(config: Any, max_model_len: int) -> str:
    """A warning about LongRoPE with this length, or ''."""
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type", rope.get("type")) == "longrope" and original and max_model_len > original:
            return (
                "LongRoPE: the factors for long texts are used for all requests, because max_model_len is"
                f" {max_model_len}. Answers to short texts may be worse: for texts of up to {original} tokens, set"
                f" max_model_len to at most {original}"
            )
    return ""


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotary parameters of each layer type, or the one set of all layers."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    nested = [kind for kind, value in found.items() if isinstance(value, Mapping)]
    return [attention_sizes.rope_parameters(config, kind) for kind in nested or [""]]
