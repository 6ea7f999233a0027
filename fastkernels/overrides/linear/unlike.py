"""Why a part of a host's module is not the layer that we compute."""

from __future__ import annotations

from torch import nn

from fastkernels.overrides.linear.modules import changed


def not_linear(module: nn.Module, *names: str) -> str | None:
    """Why these parts of a module are not plain linear layers, or None."""
    for name in names:
        child = getattr(module, name, None)
        if type(child) is not nn.Linear:
            return f"{name} is {type(child).__name__}, not nn.Linear"
        if changed(child):
            return f"{name} has hooks or a replaced forward"
    return None


def not_silu(module: nn.Module, name: str) -> str | None:
    """Why this part of a module is not SiLU, or None."""
    part = getattr(module, name, None)
    act = type(part).__name__
    if act not in ("SiLU", "SiLUActivation"):
        return f"{name} is {act}, not SiLU"
    return f"{name} has hooks or a replaced forward" if changed(part) else None
