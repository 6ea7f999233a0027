"""Drop-in torch.nn.GroupNorm, as UNets, VAEs and vision models use it: only instances inside a patched model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.diffusion.group_norm import group_norm


def _group_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as torch, whose result is in float32
    return group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


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
        return _group_norm(self, input)


class TorchGroupNorm_2_11(nn.GroupNorm):
    """torch.nn.GroupNorm before torch 2.13, without a `bias` of its own: as TorchGroupNorm."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _group_norm(self, input)


def _target(name: str, versions: str) -> Target:
    return Target(
        "torch", "torch.nn.modules.normalization:GroupNorm", name, "leaf", versions=versions, default=False,
        note="decided at first calls on a GPU, elsewhere replaced on request", computes={"silu": False}, tried=True,
    )  # fmt: skip


TARGETS = {"group_norm": (_target("TorchGroupNorm", ">=2.13"), _target("TorchGroupNorm_2_11", "<2.13"))}
