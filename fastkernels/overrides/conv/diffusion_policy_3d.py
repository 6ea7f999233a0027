"""Drop-in modules for diffusion_policy_3d (github.com/YanjieZe/3D-Diffusion-Policy): the block of its UNets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.conv1d_norm_mish import conv1d_norm_mish


class DiffusionPolicy3dConv1dBlock(nn.Module):
    """Conv1dBlock: x [B, inp_channels, L] to [B, out_channels, L]."""

    def __init__(self, inp_channels: int, out_channels: int, kernel_size: int, n_groups: int = 8) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(inp_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(n_groups, out_channels),
            nn.Mish(),
        )

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if [type(part) for part in module.block] != [nn.Conv1d, nn.GroupNorm, nn.Mish]:
            return "its block is no Conv1d, GroupNorm and Mish"
        conv, norm, _ = module.block
        (window,) = conv.kernel_size
        plain = conv.stride == conv.dilation == (1,) and conv.groups == 1 and conv.padding_mode == "zeros"
        if not plain or window % 2 == 0 or conv.padding != (window // 2,):
            return f"its convolution is {conv}: only odd windows that keep the length"
        return None if norm.affine else "its group norm has no weight"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv, norm = self.block[0], self.block[1]
        return conv1d_norm_mish(x, conv.weight, conv.bias, norm.weight, norm.bias, norm.num_groups, norm.eps)


TARGETS = {
    "conv1d_norm_mish": (
        Target(
            "diffusion_policy_3d", "diffusion_policy_3d.model.diffusion.conv1d_components:Conv1dBlock",
            "DiffusionPolicy3dConv1dBlock", "leaf",
        ),
    ),
}  # fmt: skip
