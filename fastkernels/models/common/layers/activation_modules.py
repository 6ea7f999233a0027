"""The modules of the activations in activations.py."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.models.common.descriptions.activations import NAMES, TABLE
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.descriptions.registry import load


class GatedActivation(nn.Module):
    """act(gate) * up of packed x [T, 2 * d]: to [T, d]. For activations that no op multiplies."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act(gate) * up


def make(name: str, gated: bool = False) -> nn.Module:
    """The module of one of ours: x [T, d] to the same, or if gated [T, 2 * d], the gate first, to [T, d]."""
    found = TABLE[name]
    if gated and found.gated:
        return load(found.gated)(*found.built)
    plain = load(found.module)()
    return GatedActivation(plain) if gated else plain


def named(name: str) -> nn.Module:
    """The module of an activation by its name in a config. Raises Unsupported."""
    if name not in NAMES:
        raise Unsupported(f"config.hidden_act={name!r} is not supported, only {', '.join(NAMES)}")
    return make(NAMES[name])
