"""A linear layer and the activation module behind it, as one op where the activation is GELU with tanh."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.linear.linear_gelu import fuses, linear_gelu
from fastkernels.overrides.linear.modules import changed


def activated(linear: Any, act: Any, x: torch.Tensor) -> torch.Tensor:
    """act(linear(x)); one op if the layer is a plain one and act is torch's GELU with tanh."""
    cls = type(act)
    theirs = cls.__mro__[1] if hasattr(cls, "fastkernels") else cls
    if theirs is nn.GELU and act.approximate == "tanh" and not changed(act) and fuses(linear, x):
        return linear_gelu(x, linear.weight, linear.bias, "tanh")
    return act(linear(x))
