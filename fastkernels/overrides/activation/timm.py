"""Drop-in activations for timm (timm.layers.activations). `inplace` changes nothing, as there."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.quick_gelu import quick_gelu


class TimmGELU(nn.Module):
    """timm.layers.GELU: input [..., d] to the same, with erf."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "none")


class TimmGELUTanh(nn.Module):
    """timm.layers.GELUTanh: input [..., d] to the same, with tanh."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "tanh")


class TimmQuickGELU(nn.Module):
    """timm.layers.QuickGELU: input [..., d] to the same."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quick_gelu(input)


_HOST = "timm.layers.activations:"

TARGETS = {
    "gelu": (
        Target("timm", _HOST + "GELU", "TimmGELU", "leaf", computes={"approximate": "none"}),
        Target("timm", _HOST + "GELUTanh", "TimmGELUTanh", "leaf", computes={"approximate": "tanh"}),
    ),
    "quick_gelu": (Target("timm", _HOST + "QuickGELU", "TimmQuickGELU", "leaf"),),
}
