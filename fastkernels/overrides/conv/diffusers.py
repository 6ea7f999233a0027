"""Drop-in upsampling layers of diffusers' UNets and VAEs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.upsample_conv import upsample_conv
from fastkernels.overrides.linear.modules import autocasts, changed


def _convolution(module: Any) -> Any:
    return module.conv if module.name == "conv" else module.Conv2d_0


def _unsupported(module: Any) -> str | None:
    """Why the op does not compute this layer, or None: adapters and quantized weights need their own code."""
    if module.use_conv_transpose or not module.use_conv or not module.interpolate or module.norm is not None:
        return "it has a norm or a transposed convolution, or lacks the interpolation or the convolution behind it"
    conv = _convolution(module)
    if type(conv) is not nn.Conv2d or type(conv.weight) is not nn.Parameter:
        return f"its convolution is {type(conv).__name__} with a weight of {type(conv.weight).__name__}"
    settings = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    if settings != ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros"):
        return f"its convolution has kernel size, stride, padding, dilation, groups and edges {settings}"
    return "its convolution's forward was replaced by other code" if changed(conv) else None


class DiffusersUpsample2D(nn.Module):
    """diffusers' Upsample2D with a 3x3 convolution: hidden_states [B, C, H, W] to [B, out_channels, 2H, 2W].

    Another output_size runs PyTorch's interpolation and convolution.
    """

    checks_calls = True

    def __init__(
        self,
        channels: int,
        use_conv: bool = False,
        use_conv_transpose: bool = False,
        out_channels: int | None = None,
        name: str = "conv",
        kernel_size: int | None = None,
        padding=1,
        norm_type=None,
        eps=None,
        elementwise_affine=None,
        bias=True,
        interpolate=True,
    ):
        super().__init__()
        if not use_conv or use_conv_transpose or norm_type is not None or not interpolate:
            raise ValueError(
                "Upsample2D: only interpolation with a convolution and without a norm is supported"
            )
        self.channels = channels
        self.out_channels = out_channels or channels
        self.use_conv, self.use_conv_transpose = use_conv, use_conv_transpose
        self.name, self.interpolate, self.norm = name, interpolate, None
        size = 3 if kernel_size is None else kernel_size
        conv = nn.Conv2d(channels, self.out_channels, kernel_size=size, padding=padding, bias=bias)
        setattr(self, "conv" if name == "conv" else "Conv2d_0", conv)

    supports = staticmethod(_unsupported)

    def forward(
        self, hidden_states: torch.Tensor, output_size: int | None = None, *args, **kwargs
    ) -> torch.Tensor:
        assert hidden_states.shape[1] == self.channels
        conv = _convolution(self)
        double = [2 * n for n in hidden_states.shape[2:]]
        size = double if output_size is None else list(output_size)  # type: ignore[call-overload]
        reason = _unsupported(self)
        if size != double:
            reason = f"output_size {tuple(size)} is not twice {tuple(hidden_states.shape[2:])}"
        elif autocasts(hidden_states):
            reason = "autocast chooses the convolution's dtype"
        if reason is None:
            return upsample_conv(hidden_states, conv.weight, conv.bias)
        upsample_conv.note(reason)
        return conv(F.interpolate(hidden_states, size=size, mode="nearest"))


TARGETS = {
    "upsample_conv": (
        Target(
            "diffusers",
            "diffusers.models.upsampling:Upsample2D",
            "DiffusersUpsample2D",
            "module",
            default=False,
            note="decided at first calls on a GPU, elsewhere replaced on request",
            tried=True,
            compiled=True,  # 1.9 to 3.5 times as fast as both steps in bfloat16
        ),
    )
}
