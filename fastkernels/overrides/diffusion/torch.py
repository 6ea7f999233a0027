"""Drop-in torch.nn.GroupNorm, as UNets, VAEs and vision models use it: only instances inside a patched model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.diffusion.group_norm import group_norm


class TorchGroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm: input [B, num_channels, ...] to the same; weight and bias [num_channels], or None."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, bias=bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.float()  # as torch, whose result is in float32
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


TARGETS = {
    "group_norm": (
        Target(
            "torch", "torch.nn.modules.normalization:GroupNorm", "TorchGroupNorm", "leaf", versions=">=2.13",
            default=False, note="decided at first calls on a GPU, elsewhere replaced on request",
            computes={"silu": False}, tried=True,
        ),
    ),
}  # fmt: skip
