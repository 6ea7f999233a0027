"""The longest sequence of a model, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.core.registry import UnknownName
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Attention, Decoder, Recurrent, Unsupported
from fastkernels.overrides.block import attention_sizes

UNKNOWN = 2048  # for a config without a length, as vLLM
UNLIMITED = 1 << 17  # for layers that keep states of a fixed size: like the contexts of current models


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


def default(config: Any) -> int:
    """The longest sequence without max_model_len: the model's own limit, else UNLIMITED or UNKNOWN."""
    if own := longest(config):
        return own
    found = _described(config)
    states = found is not None and all(isinstance(layer.attention, Recurrent) for layer in found.layers)
    return UNLIMITED if states else UNKNOWN


def has_positions(config: Any) -> bool:
    """Whether a layer, or the embedding, depends on positions. Without them, the config's limit is a recommendation."""
    found = _described(config)
    if found is None or found.positions is not None:
        return True
    mixers = [layer.attention for layer in found.layers]
    return any(m.rope is not None or (isinstance(m, Attention) and m.alibi is not None) for m in mixers)


def _described(config: Any) -> Decoder | None:
    """The description of a decoder; None for other models."""
    known = registry.by_architecture().get((getattr(config, "architectures", None) or [""])[0])
    if known is None or known.arch.runner != "Generate":
        return None
    try:
        return registry.describe(config)
    except (UnknownName, Unsupported):
        return None  # reported where the model is built


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
