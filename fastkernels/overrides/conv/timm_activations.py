"""Activations of timm's layers: modules, and their names in conv/epilogue.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fastkernels.overrides.linear.modules import changed

# {class of an activation, in torch and timm: its name in conv/epilogue.py}
ACTIVATIONS = {
    "Identity": "none", "ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu", "Swish": "silu", "GELUTanh": "gelu_tanh",
    "Hardswish": "hard_swish", "HardSwish": "hard_swish", "Hardsigmoid": "hard_sigmoid",
    "HardSigmoid": "hard_sigmoid", "Sigmoid": "sigmoid",
}  # fmt: skip
BY_NAME: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "silu": nn.SiLU, "swish": nn.SiLU, "gelu": nn.GELU,
    "hard_swish": nn.Hardswish, "hard_sigmoid": nn.Hardsigmoid, "sigmoid": nn.Sigmoid,
}  # fmt: skip


def activation_of(act: Any) -> str | None:
    """The activation that a module computes, as conv/epilogue.py names it; None: another one, or changed code."""
    if changed(act):
        return None
    name = type(act).__name__
    if name == "GELU":
        return "gelu_tanh" if getattr(act, "approximate", "none") == "tanh" else "gelu"
    return ACTIVATIONS.get(name)


def not_activation(act: Any) -> str | None:
    """Return why `activation_of` has no name for a module, or None."""
    if changed(act):
        return "other code was put around its activation"
    return None if activation_of(act) is not None else f"its activation is {type(act).__name__}"


def act_of(layer: Any, kwargs: Any = None) -> nn.Module:
    """The module of an activation that is given as a class, a name or None. Raises ValueError."""
    if layer is None:
        return nn.Identity()
    if isinstance(layer, str):
        if layer not in BY_NAME:
            raise ValueError(f"act_layer must be a class or one of {', '.join(BY_NAME)}, got {layer!r}")
        return BY_NAME[layer]()
    return layer(**(kwargs or {}))
