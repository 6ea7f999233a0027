"""Drop-in activations for transformers (transformers.activations)."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.activation.relu2 import relu2


class TransformersGELUActivation(nn.Module):
    """GELUActivation: input [..., d] to the same, with erf; use_gelu_python changes nothing."""

    def __init__(self, use_gelu_python: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "none")


class TransformersGELUTanh(nn.Module):
    """GELUTanh: input [..., d] to the same, with tanh; use_gelu_tanh_python changes nothing."""

    def __init__(self, use_gelu_tanh_python: bool = False) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "tanh")


class TransformersNewGELUActivation(nn.Module):
    """NewGELUActivation and FastGELUActivation: input [..., d] to the same, with tanh."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "tanh")


class TransformersAccurateGELUActivation(nn.Module):
    """AccurateGELUActivation: input [..., d] to the same, with tanh."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, "tanh")


class TransformersQuickGELUActivation(nn.Module):
    """QuickGELUActivation: input [..., d] to the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quick_gelu(input)


class TransformersReLUSquaredActivation(nn.Module):
    """ReLUSquaredActivation: input [..., d] to the same."""

    def forward(self, input):
        return relu2(input)


_HOST = "transformers.activations:"
_ERF, _TANH = {"approximate": "none"}, {"approximate": "tanh"}


def _target(name: str, cls: str, computes: dict[str, str] | None = None) -> Target:
    return Target("transformers", _HOST + name, f"Transformers{cls}", "leaf", computes=computes or {})


TARGETS = {
    "gelu": (
        _target("GELUActivation", "GELUActivation", _ERF),
        _target("GELUTanh", "GELUTanh", _TANH),
        _target("NewGELUActivation", "NewGELUActivation", _TANH),
        _target("FastGELUActivation", "NewGELUActivation", _TANH),
        _target("AccurateGELUActivation", "AccurateGELUActivation", _TANH),
    ),
    "quick_gelu": (_target("QuickGELUActivation", "QuickGELUActivation"),),
    "relu2": (_target("ReLUSquaredActivation", "ReLUSquaredActivation"),),
}
