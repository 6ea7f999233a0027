"""Drop-in activations for torch.nn, as models of every host use them: only instances inside a patched model."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu


class TorchGELU(nn.Module):
    """torch.nn.GELU: input [..., d] to the same; approximate: 'none' (erf) or 'tanh'."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, self.approximate)


TARGETS = {"gelu": (Target("torch", "torch.nn.modules.activation:GELU", "TorchGELU", "leaf"),)}
