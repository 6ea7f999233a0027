"""Drop-in residual blocks of HunyuanVideo-1.5's image model in diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.norm_pad import norm_pad
from fastkernels.overrides.linear.modules import changed


class ChannelNorm(nn.Module):
    """The parameters of diffusers' HunyuanVideo15RMS_norm of a video."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))
        self.bias = 0.0
        self.channel_first = True


class CausalConv3d(nn.Module):
    """diffusers' HunyuanVideo15CausalConv3d with a 3x3x3 kernel, under its parameter names."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.pad_mode = "replicate"
        self.time_causal_padding = (1, 1, 1, 1, 2, 0)
        self.conv = nn.Conv3d(channels, out, 3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(hidden_states, self.time_causal_padding, mode=self.pad_mode)
        return self.conv(padded)


def _not_plain(norm: Any) -> str | None:
    """Why norm_pad does not compute a norm of the host, or None."""
    if changed(norm):
        return "other code was put around its norm"
    if not norm.channel_first or not isinstance(norm.bias, float) or norm.gamma.dim() != 4:
        return "its norm is not of the channels of a video, without bias"
    return None


def _not_causal(conv: Any) -> str | None:
    """Why norm_pad does not pad for a convolution of the host, or None."""
    if changed(conv):
        return "other code was put around its convolution"
    if conv.pad_mode != "replicate" or tuple(conv.time_causal_padding) != (1, 1, 1, 1, 2, 0):
        return f"its padding is {tuple(conv.time_causal_padding)} by {conv.pad_mode}"
    return None


def normed(norm: Any, x: torch.Tensor, silu: bool = True, pad: bool = True) -> torch.Tensor:
    """SiLU of the norm of x [B, C, F, H, W], padded for a causal convolution."""
    return norm_pad(x, norm.gamma.flatten().to(x.dtype), silu, pad)


class DiffusersHunyuanVideo15ResnetBlock(nn.Module):
    """diffusers' HunyuanVideo15ResnetBlock: hidden_states [B, C, F, H, W] to [B, out_channels, F, H, W].

    Norm, SiLU and the padding of the convolution behind them are one pass, and the video keeps its channels last.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        non_linearity: str = "swish",
    ) -> None:
        super().__init__()
        if non_linearity not in ("swish", "silu"):
            raise ValueError(f"non_linearity {non_linearity!r} is not supported: only 'swish'")
        out_channels = out_channels or in_channels
        self.nonlinearity = nn.SiLU()
        self.norm1, self.norm2 = ChannelNorm(in_channels), ChannelNorm(out_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        same = in_channels == out_channels
        self.conv_shortcut = None if same else nn.Conv3d(in_channels, out_channels, 1)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this block (ours or the host's), or None."""
        if type(module.nonlinearity) is not nn.SiLU:
            return f"its activation is {type(module.nonlinearity).__name__}, not SiLU"
        if changed(module.nonlinearity):
            return "other code was put around its activation"
        parts = [_not_plain(n) for n in (module.norm1, module.norm2)]
        parts += [_not_causal(c) for c in (module.conv1, module.conv2)]
        return next((reason for reason in parts if reason is not None), None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.conv1.conv(normed(self.norm1, hidden_states))
        x = self.conv2.conv(normed(self.norm2, x))
        return x + (hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states))


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


TARGETS = {
    "norm_pad": (
        Target(
            "diffusers",
            "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15:HunyuanVideo15ResnetBlock",
            "DiffusersHunyuanVideo15ResnetBlock", "module", default=False, note=_NOTE, tried=True,
        ),
    ),
}  # fmt: skip
