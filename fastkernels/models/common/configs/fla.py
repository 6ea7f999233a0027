"""Configs of flash-linear-attention's models, which transformers does not have, and what their descriptions share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.descriptions import description as d

# Fields of all its models with their defaults
FIELDS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "hidden_ratio": 4, "intermediate_size": None,
    "max_position_embeddings": 2048, "fuse_norm": True, "attn": None, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
# The same of its models of linear attention
LINEAR: dict[str, Any] = {
    "num_kv_heads": None, "feature_map": None, "use_short_conv": False, "conv_size": 4, "use_output_gate": True,
    "hidden_act": "swish", "elementwise_affine": True, "norm_eps": 1e-6, "attnres_block_size": None,
}  # fmt: skip
# Of layers with attention
SPEC: dict[str, Any] = {
    "layers": None, "num_heads": None, "num_kv_heads": None, "qkv_bias": False, "window_size": None,
    "rope_theta": 10000.0,
}  # fmt: skip


def fields(raw: Mapping[str, Any], *defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json with defaults, and `layer_types` and `sliding_window` if `attn` names layers.

    Without layers of attention, the length of a sequence has no limit: FLA ignores max_position_embeddings.
    Raises Unsupported for an `attn` that is not supported.
    """
    made = {**FIELDS, **{k: v for each in defaults for k, v in each.items()}, **raw}
    specs = _specs(made) if type(made["num_hidden_layers"]) is int else []  # others are refused later
    if not specs:
        return {**made, "max_position_embeddings": None}
    types = ["linear_attention"] * made["num_hidden_layers"]
    windows = {spec["window_size"] for spec in specs} - {None}
    if len(windows) > 1:
        raise d.Unsupported(f"config.attn={made['attn']!r}: windows of several sizes are not supported")
    for spec in specs:
        for i in spec["layers"]:
            types[i] = "full_attention" if spec["window_size"] is None else "sliding_attention"
    return {**made, "layer_types": types, "sliding_window": next(iter(windows), None)}


def _specs(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tables in `attn` with all their fields."""
    attn, count = made["attn"], made["num_hidden_layers"]
    if attn is None:
        return []
    specs, taken = [], []
    for table in attn if isinstance(attn, list) else [attn]:
        known = isinstance(table, Mapping) and isinstance(table.get("layers"), list)
        spec = {**SPEC, **table} if known else {}
        numbers = [spec.get("num_heads"), spec.get("num_kv_heads") or 1, spec.get("window_size") or 1]
        ok = spec.keys() == SPEC.keys() and all(type(n) is int and n > 0 for n in numbers)
        ok = ok and type(spec["qkv_bias"]) is bool and type(spec["rope_theta"]) in (int, float)
        taken += spec.get("layers", [])
        if not ok or any(type(i) is not int or not 0 <= i < count or taken.count(i) > 1 for i in taken):
            raise d.Unsupported(
                f"config.attn={attn!r} is not supported, only tables with `layers`, numbers below {count} of which"
                " each occurs once, `num_heads`, and optionally num_kv_heads, qkv_bias, window_size, rope_theta"
            )
        specs.append(spec)
    return specs


def positive(config: Any, *names: str) -> None:
    """Raise Unsupported for a field that is not an integer above 0."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise d.Unsupported(f"config.{name}={value!r} is not supported, only integers above 0")


def numbers(config: Any, *names: str) -> None:
    """Raise Unsupported for a field that is not a number above 0."""
    for name in names:
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise d.Unsupported(f"config.{name}={value!r:.80} is not supported, only numbers above 0")


def mlp_size(config: Any, gated: bool) -> int:
    """config.intermediate_size, or by hidden_ratio: 2/3 of it with a gate, in steps of 256, or of 32 without."""
    if config.intermediate_size is not None:
        positive(config, "intermediate_size")
        return int(config.intermediate_size)
    size, step = config.hidden_size * (config.hidden_ratio or 4), 256 if gated else 32
    return step * -(-int(size * 2 / 3 if gated else size) // step)


def linear_decoder(config: Any, **differs: Any) -> d.Decoder:
    """The decoder of linear attention with the sizes of a config. differs: fields of LinearAttention

    Raises Unsupported.
    """
    d.refuse(config, hidden_act="swish", feature_map=None, elementwise_affine=True, attnres_block_size=None)
    numbers(config, "norm_eps")
    norm, heads = d.Norm(eps=config.norm_eps), config.num_heads
    positive(config, "num_heads", "conv_size")
    kv_heads = heads if config.num_kv_heads is None else config.num_kv_heads
    if type(kv_heads) is not int or kv_heads < 1 or heads % kv_heads:
        raise d.Unsupported(
            f"config.num_kv_heads={kv_heads!r} is not supported, only divisors of num_heads={heads}"
        )
    fused = config.fuse_norm and config.use_output_gate
    mixer = d.LinearAttention(
        config.conv_size if config.use_short_conv else 1, heads=heads, kv_heads=kv_heads,
        key_size=_head_size(config, "expand_k", even="rope" in differs), value_size=_head_size(config, "expand_v"),
        norm=norm, norm_name="g_norm_swish_gate" if fused else "g_norm", gated=bool(config.use_output_gate), **differs,
    )  # fmt: skip
    mlp = d.Mlp(mlp_size(config, gated=True))
    attentions = {i: _attention(config, spec) for spec in _specs(vars(config)) for i in spec["layers"]}
    layers = tuple(
        d.Layer(
            attentions.get(i, mixer), mlp, before_attention=norm, before_mlp=norm,
            names={"self_attn": "attn", "before_attention": "attn_norm", "before_mlp": "mlp_norm"},
        )
        for i in range(config.num_hidden_layers)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, bool(config.tie_word_embeddings))


def _head_size(config: Any, name: str, even: bool = False) -> int:
    """The size of a head, of which all have hidden_size times a factor."""
    factor = getattr(config, name)
    whole = config.hidden_size * factor if type(factor) in (int, float) else 0
    size, rest = divmod(round(whole), config.num_heads)
    if size < 1 or rest or not math.isclose(whole, round(whole)) or (even and size % 2):
        raise d.Unsupported(
            f"config.{name}={factor!r} is not supported, only factors of hidden_size={config.hidden_size} that give"
            f" multiples of num_heads={config.num_heads}{', with an even size of heads' if even else ''}"
        )
    return size


def _attention(config: Any, spec: Mapping[str, Any]) -> d.Attention:
    heads, kv_heads = spec["num_heads"], spec["num_kv_heads"] or spec["num_heads"]
    if config.hidden_size % heads or heads % kv_heads:
        raise d.Unsupported(
            f"config.attn={spec!r}: num_heads must divide hidden_size={config.hidden_size}, and num_kv_heads must"
            " divide num_heads"
        )
    return d.Attention(
        heads, kv_heads, config.hidden_size // heads, bias=spec["qkv_bias"], window=spec["window_size"],
        rope={"rope_type": "default", "rope_theta": spec["rope_theta"]}, max_positions=config.max_position_embeddings,
    )  # fmt: skip
