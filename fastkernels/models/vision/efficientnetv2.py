"""EfficientNetV2 (Tan and Le, arXiv 2104.00298): features and classes of images, from timm's checkpoints.

The interface is that of dinov3.py; see models/common/layers/cnn.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import cnn
from fastkernels.models.vision.siglip2_vision import mean

RATIO = 0.25  # of the gates' MLP


@dataclass(frozen=True)
class Stage:
    """Layers of one width: the convolutions, FusedMBConv, or MBConv with gates.

    kind  'cn', 'er' or 'ir', as timm has them
    """

    kind: str
    repeats: int
    stride: int
    expansion: int
    channels: int
    skip: bool = False


@dataclass(frozen=True)
class Variant:
    """A model's sizes. width, depth: factors of channels and layers; limit: see cnn.divisible."""

    stem: int
    stages: tuple[Stage, ...]
    width: float = 1.0
    depth: tuple[float, ...] = (1.0,) * 7
    head: int = 1280
    limit: float = 0.9


def _stages(*sizes: tuple[int, int, int, int], convolutions: bool = True) -> tuple[Stage, ...]:
    """Stages of (repeats, stride, expansion, channels): one of convolutions, two of FusedMBConv, others of MBConv."""
    kinds = ("cn" if convolutions else "er", "er", "er", *["ir"] * (len(sizes) - 3))
    return tuple(Stage(kind, *size, skip=kind == "cn") for kind, size in zip(kinds, sizes, strict=True))


_S = ((2, 1, 1, 24), (4, 2, 4, 48), (4, 2, 4, 64), (6, 2, 4, 128), (9, 1, 6, 160))
_SMALL = Variant(24, _stages(*_S, (15, 2, 6, 256)))
_RW = Variant(24, _stages(*_S, (15, 2, 6, 272), convolutions=False), head=1792)
_MEDIUM = Variant(24, _stages((3, 1, 1, 24), (5, 2, 4, 48), (5, 2, 4, 80), (7, 2, 4, 160), (14, 1, 6, 176),
                              (18, 2, 6, 304), (5, 1, 6, 512)))  # fmt: skip
_LARGE = Variant(32, _stages((4, 1, 1, 32), (7, 2, 4, 64), (7, 2, 4, 96), (10, 2, 4, 192), (19, 1, 6, 224),
                             (25, 2, 6, 384), (7, 1, 6, 640)))  # fmt: skip
_XL = Variant(32, _stages((4, 1, 1, 32), (8, 2, 4, 64), (8, 2, 4, 96), (16, 2, 4, 192), (24, 1, 6, 256),
                          (32, 2, 6, 512), (8, 1, 6, 640)))  # fmt: skip
_BASE = Variant(32, _stages((1, 1, 1, 16), (2, 2, 4, 32), (2, 2, 4, 48), (3, 2, 4, 96), (5, 1, 6, 112),
                            (8, 2, 6, 192)), limit=0.0)  # fmt: skip
VARIANTS = {
    "efficientnetv2_rw_t": replace(_SMALL, width=0.8, depth=(0.9,) * 6),
    "efficientnetv2_rw_s": _RW,
    "efficientnetv2_rw_m": replace(_RW, width=1.2, depth=(1.2,) * 4 + (1.6,) * 2),
    **{f"{prefix}efficientnetv2_{size}": variant
       for prefix in ("", "tf_")
       for size, variant in (("s", _SMALL), ("m", _MEDIUM), ("l", _LARGE), ("xl", _XL))},
    "tf_efficientnetv2_b0": _BASE,
    "tf_efficientnetv2_b1": replace(_BASE, depth=(1.1,) * 6),
    "tf_efficientnetv2_b2": replace(_BASE, width=1.1, depth=(1.2,) * 6),
    "tf_efficientnetv2_b3": replace(_BASE, width=1.2, depth=(1.4,) * 6),
}  # fmt: skip


def _block(style: cnn.Style, stage: Stage, channels: int, out: int, stride: int) -> nn.Module:
    if stage.kind == "cn":
        return cnn.ConvBnAct(style, channels, out, 3, stride, stage.skip)
    if stage.kind == "er":
        return cnn.EdgeResidual(style, channels, out, 3, stride, stage.expansion)
    return cnn.InvertedResidual(style, channels, out, 3, stride, stage.expansion, RATIO)


class EfficientNetV2(cnn.Folded):
    """config: of timm, see models/common/configs/timm_config.py. An image's vector is the mean of its hidden states.

    Raises Unsupported.
    """

    prefix_tokens = 0
    norms = (("conv_stem", "bn1"), ("conv_head", "bn2"))

    def __init__(self, config: Any) -> None:
        super().__init__()
        cnn.check_timm(config, tuple(VARIANTS))
        variant, self.channels = VARIANTS[config.architecture], config.num_channels
        tensorflow = config.architecture.startswith("tf_")
        self.style = cnn.Style("silu", 1e-3 if tensorflow else 1e-5, same=tensorflow)

        def wide(channels: int) -> int:
            return cnn.divisible(channels * variant.width, variant.limit)

        width, head = wide(variant.stem), wide(variant.head)
        self.conv_stem, self.bn1 = cnn.Conv(self.channels, width, 3, 2), cnn.BatchNorm(width)
        stages = []
        for stage, factor in zip(variant.stages, variant.depth, strict=False):
            blocks = []
            for i in range(math.ceil(stage.repeats * factor)):
                out = wide(stage.channels)
                blocks.append(_block(self.style, stage, width, out, 1 if i else stage.stride))
                width = out
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = cnn.Conv(width, head), cnn.BatchNorm(head)
        self.num_labels = config.num_labels
        if self.num_labels:
            self.classifier = cnn.Classifier(head, self.num_labels)

    def forward(self, patches: torch.Tensor, grids: cnn.Grids) -> torch.Tensor:
        return cnn.encode(patches, grids, self.channels, self.conv_stem.weight.dtype, self._features)

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        x = cnn.convolve(x, self.conv_stem, self.bn1, self.style, "silu")
        return cnn.convolve(self.blocks(x), self.conv_head, self.bn2, self.style, "silu")

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return mean(hidden, starts)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.classifier(mean(hidden, starts))


ARCH = Architecture(
    names=("EfficientNetV2",),
    category="vision",
    model="EfficientNetV2",
    runner="Encode",
    model_type="timm_efficientnetv2",
    timm=("efficientnetv2_", "tf_efficientnetv2_"),
    inputs="images",
    packed={},
    unused=("*.num_batches_tracked",),
)
