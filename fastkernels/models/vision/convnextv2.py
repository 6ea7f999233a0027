"""ConvNeXt V2 (Woo et al., arXiv 2301.00808): features and classes of images, from timm's checkpoints.

The interface is that of dinov3.py; see models/common/layers/cnn.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers import cnn
from fastkernels.models.vision.siglip2_vision import mean
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.conv.global_response_norm import global_response_norm
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.vllm import VllmLayerNorm

EPS = 1e-6
WIDER = 4  # the MLP
_SMALL, _LARGE = (2, 2, 6, 2), (3, 3, 27, 3)
VARIANTS = {  # (layers and channels of the stages, whether the checkpoint has the MLP as 1x1 convolutions)
    "convnextv2_atto": (_SMALL, (40, 80, 160, 320), True),
    "convnextv2_femto": (_SMALL, (48, 96, 192, 384), True),
    "convnextv2_pico": (_SMALL, (64, 128, 256, 512), True),
    "convnextv2_nano": ((2, 2, 8, 2), (80, 160, 320, 640), True),
    "convnextv2_tiny": ((3, 3, 9, 3), (96, 192, 384, 768), False),
    "convnextv2_small": (_LARGE, (96, 192, 384, 768), False),
    "convnextv2_base": (_LARGE, (128, 256, 512, 1024), False),
    "convnextv2_large": (_LARGE, (192, 384, 768, 1536), False),
    "convnextv2_huge": (_LARGE, (352, 704, 1408, 2816), False),
}
STYLE = cnn.Style("none")


class Dense(nn.Module):
    """The weight of a linear layer, [N, K] or, as a 1x1 convolution, [N, K, 1, 1], and its bias."""

    def __init__(self, size: int, out: int, convolution: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, size, *[1] * (2 * convolution)))
        self.bias = nn.Parameter(torch.empty(out))


class GlobalResponseNorm(nn.Module):
    """x [B, T, C] to the same."""

    ops = ("global_response_norm",)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(channels)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return global_response_norm(x, self.weight, self.bias, EPS)


class Mlp(nn.Module):
    """Two linear layers with GELU and response normalization between them: x [B, T, C], added to the residual."""

    ops = ("linear_gelu", "linear_residual")

    def __init__(self, channels: int, convolutions: bool) -> None:
        super().__init__()
        self.fc1 = Dense(channels, WIDER * channels, convolutions)
        self.grn = GlobalResponseNorm(WIDER * channels)
        self.fc2 = Dense(WIDER * channels, channels, convolutions)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        wide = self.grn(linear_gelu(x, self.fc1.weight.flatten(1), self.fc1.bias, "none"))
        return linear_residual(residual, wide, self.fc2.weight.flatten(1), self.fc2.bias)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] as [B, T, C]."""
    return x.flatten(2).transpose(1, 2)


def _image(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, T, C] as [B, C, H, W], with the rows of `like`."""
    return tokens.unflatten(1, (like.shape[2], -1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution, a norm and the MLP: [B, C, H, W] to the same."""

    def __init__(self, channels: int, convolutions: bool) -> None:
        super().__init__()
        self.conv_dw = cnn.Conv(channels, channels, 7, groups=channels, bias=True)
        self.norm = VllmLayerNorm(channels, EPS)
        self.mlp = Mlp(channels, convolutions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(_tokens(cnn.convolve(x, self.conv_dw, None, STYLE)))
        return _image(self.mlp(mixed, _tokens(x)), x)


class Downsample(nn.Module):
    """A norm and a convolution of pixels that do not overlap; in the stem, the other way around.

    In the checkpoint both are entries of a sequence, which `order` names.
    """

    def __init__(self, channels: int, out: int, window: int, order: tuple[str, str]) -> None:
        super().__init__()
        self.order = order
        conv = cnn.Conv(channels, out, window, window, bias=True, padding=0)
        norm = VllmLayerNorm(out if order[0] == "0" else channels, EPS)
        for name, module in sorted(zip(order, (conv, norm), strict=True)):
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv, norm = (self.get_submodule(name) for name in self.order)
        if self.order[0] == "0":
            x = cnn.convolve(x, conv, None, STYLE)  # type: ignore[arg-type]
            return _image(norm(_tokens(x)), x)
        return cnn.convolve(_image(norm(_tokens(x)), x), conv, None, STYLE)  # type: ignore[arg-type]


class Stage(nn.Module):
    """Layers of one width."""

    def __init__(self, channels: int, out: int, depth: int, convolutions: bool, first: bool) -> None:
        super().__init__()
        self.downsample = None if first else Downsample(channels, out, 2, ("1", "0"))
        self.blocks = nn.Sequential(*(Block(out, convolutions) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x if self.downsample is None else self.downsample(x))


class Head(nn.Module):
    """The norm of an image's mean, and the classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = VllmLayerNorm(channels, EPS)
        if classes:
            self.fc = cnn.Classifier(channels, classes)


class ConvNeXtV2(nn.Module):
    """config: of timm, see configs/timm_config.py. An image's vector is the normalized mean of its hidden states.

    Raises Unsupported.
    """

    prefix_tokens = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        cnn.check_timm(config, tuple(VARIANTS), ("depths", "dims"))
        *sizes, convolutions = VARIANTS[config.architecture]
        depths, widths = (_sizes(config, *each) for each in zip(("depths", "dims"), sizes, strict=True))
        self.channels = config.num_channels
        self.stem = Downsample(self.channels, widths[0], 4, ("0", "1"))
        before = (widths[0], *widths)
        self.stages = nn.Sequential(
            *(Stage(before[i], widths[i], depths[i], convolutions, not i) for i in range(len(widths)))
        )
        self.num_labels = config.num_labels
        self.head = Head(widths[-1], self.num_labels)

    def forward(self, patches: torch.Tensor, grids: cnn.Grids) -> torch.Tensor:
        return cnn.encode(
            patches,
            grids,
            self.channels,
            self.stem.get_parameter("0.weight").dtype,
            lambda x: self.stages(self.stem(x)),
        )

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head.norm(mean(hidden, starts))

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head.fc(self.pool(hidden, starts))


def _sizes(config: Any, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    found = config.model_args.get(name, default)
    if len(found) != len(default) or not all(type(n) is int and n > 0 for n in found):
        raise Unsupported(f"config.model_args: {name}={found!r} is not four integers above 0, one a stage")
    return tuple(found)


ARCH = Architecture(
    names=("ConvNeXtV2",),
    category="vision",
    model="ConvNeXtV2",
    runner="Encode",
    model_type="timm_convnextv2",
    timm=("convnextv2_",),
    inputs="images",
    packed={},
    unused=(),
)
