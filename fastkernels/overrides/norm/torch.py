"""Drop-in normalizations for torch.nn, as models of every host use them: only instances inside a patched model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.layer_norm import layer_norm, unsupported_shape
from fastkernels.overrides.norm.rms_norm import rms_norm


class TorchLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension: input [..., H]; weight and bias [H], or None."""

    supports = staticmethod(unsupported_shape)

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.float()  # as torch, whose result is in float32
        return layer_norm(input, self.weight, self.bias, self.eps)


class TorchRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension: x [..., H], rounded once; weight [H], or None."""

    supports = staticmethod(unsupported_shape)

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, None, None, False)


_HOST = "torch.nn.modules.normalization:"

TARGETS = {
    "layer_norm": (Target("torch", _HOST + "LayerNorm", "TorchLayerNorm", "leaf"),),
    "rms_norm": (Target("torch", _HOST + "RMSNorm", "TorchRMSNorm", "leaf"),),
}
