"""Drop-in torch.nn convolutions: only patch embeddings, and only instances inside a patched model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.patch_embedding import patch_embedding
from fastkernels.overrides.kit.modules import autocasts


def _without_overlap(module: Any) -> bool:
    """Whether each number of the input is in at most one window, and windows have more than one place."""
    n = len(module.kernel_size)
    return (
        module.stride == module.kernel_size
        and math.prod(module.kernel_size) > 1
        and module.padding in ((0,) * n, "valid")
        and module.dilation == (1,) * n
        and module.groups == 1
    )


def _embedded(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The convolution of x [B, C, ...] or [C, ...]: [B, N, ...], with channels last in memory."""
    weight, bias, dims = module.weight, module.bias, module.weight.dim()
    if x.dim() == dims - 1:
        return _embedded(module, x[None])[0]
    if x.dim() != dims:
        raise ValueError(f"expected an input of {dims - 1} or {dims} dimensions, got {tuple(x.shape)}")
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if dims == 4:
        return patch_embedding(x[:, :, None], weight[:, :, None], bias)[:, 0].permute(0, 3, 1, 2)
    return patch_embedding(x, weight, bias).permute(0, 4, 1, 2, 3)


class _WithoutOverlap(nn.Module):
    applies = staticmethod(_without_overlap)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _embedded(self, input)


class TorchConv2d(_WithoutOverlap, nn.Conv2d):
    """torch.nn.Conv2d whose stride is its kernel size, without padding, dilation and groups: input [B, C, H, W]."""


class TorchConv3d(_WithoutOverlap, nn.Conv3d):
    """torch.nn.Conv3d whose stride is its kernel size, as TorchConv2d: input [B, C, D, H, W]."""


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(name: str) -> Target:
    return Target(
        "torch",
        f"torch.nn.modules.conv:{name}",
        f"Torch{name}",
        "leaf",
        default=False,
        note=_NOTE,
        tried=True,
    )


TARGETS = {"patch_embedding": (_target("Conv2d"), _target("Conv3d"))}
