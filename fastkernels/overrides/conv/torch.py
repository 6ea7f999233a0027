"""Drop-in torch.nn convolutions: only patch embeddings, and only instances inside a patched model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.patch_embedding import embedded, without_overlap


class _WithoutOverlap(nn.Module):
    applies = staticmethod(without_overlap)

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
        return embedded(self, input)


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
