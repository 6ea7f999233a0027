"""Fields of a config that its model does not have: of those that vLLM applies to any model, and kinds of layers.

A checkpoint with such a field has two meanings, so it is refused by name. Fields that both ignore are ignored.
"""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions.description import (
    Attention,
    Decoder,
    NoMixer,
    Recurrent,
    ShortConv,
    Unsupported,
    ambiguous,
)

RECURRENT = {"linear_attention": Recurrent, "conv": ShortConv, "mlp": NoMixer}  # kinds of layers


def check(config: Any, described: Decoder) -> None:
    """Raise Unsupported for a field of the config that vLLM applies, and that the description does not contain."""
    _check_layer_types(config, described)
    _check_windows(config, described)
    scale = getattr(config, "logit_scale", None)
    if scale is not None and scale != described.logits_scale:
        raise Unsupported(ambiguous(config, f"logit_scale={scale!r}", "does not scale its logits"))
    ropes = [a.rope for layer in described.layers if isinstance(a := layer.attention, Attention)]
    partial = {1.0 if rope is None else rope.get("partial_rotary_factor", 1.0) for rope in ropes}
    for name in ("rotary_pct", "rotary_emb_fraction"):
        factor = getattr(config, name, None)
        if factor is not None and partial and factor not in partial:
            raise Unsupported(ambiguous(config, f"{name}={factor!r}", "has another size of rotary embedding"))
    if getattr(config, "dual_chunk_attention_config", None):
        raise Unsupported(ambiguous(config, "dual_chunk_attention_config", "has no chunks"))
    if getattr(config, "is_causal", None) is False:
        raise Unsupported("config.is_causal=False (bidirectional attention) is not supported, only True")


def check_axes(described: Decoder) -> None:
    """Raise Unsupported if the rotary embedding of a model with images has no parts for time, rows and columns."""
    ropes = [a.rope for layer in described.layers if isinstance(a := layer.attention, Attention)]
    if not all((rope or {}).get("mrope_section") for rope in ropes):
        raise Unsupported(
            "config.rope_parameters (or rope_scaling) has no mrope_section, the pairs of a head that turn with time, "
            'rows and columns: write it next to the rope_type, as "mrope_section": [24, 20, 20]'
        )


def _check_layer_types(config: Any, described: Decoder) -> None:
    kinds = zip(getattr(config, "layer_types", None) or (), described.layers, strict=False)
    for kind, layer in kinds:
        if kind in RECURRENT and not isinstance(layer.attention, RECURRENT[kind]):
            raise Unsupported(f"config.layer_types has {kind}, which {config.architectures[0]} does not have")


def _check_windows(config: Any, described: Decoder) -> None:
    """vLLM takes windows from layer_types, or without them has sliding_window in every layer."""
    types, size = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    ours = [_shorter(layer.attention.window, config) for layer in described.layers]
    if not any(ours) and getattr(config, "use_sliding_window", None) is False:
        return
    size = _shorter(size, config)
    if types is None:
        theirs = [size] * len(ours)
    else:
        theirs = [size if kind == "sliding_attention" else None for kind in types]
    if ours == theirs[: len(ours)]:  # a config with fewer layers may keep the types of all
        return
    has = "has no window" if not any(ours) else f"has a window of {size} in every layer"
    field = f"sliding_window={size}" if types is None else f"layer_types={types!r} with sliding_window={size}"
    raise Unsupported(ambiguous(config, field, has))


def _shorter(window: int | None, config: Any) -> int | None:
    """A window, unless it is as long as the context."""
    longest = getattr(config, "max_position_embeddings", None)
    return window if window and (longest is None or window < longest) else None
