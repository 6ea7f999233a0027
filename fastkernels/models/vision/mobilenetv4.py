"""MobileNetV4 without attention (Qin et al., arXiv 2404.10518): features and classes of images, from timm checkpoints.

The interface is that of dinov3.py; see models/common/layers/cnn.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import cnn
from fastkernels.models.vision.siglip2_vision import mean

# A stage is rows of (repeats, window in front, window in the middle, stride, expansion, channels) of universal inverted
# bottlenecks. The stages before are ('cn': convolution or 'er': FusedMBConv, window, stride, expansion, channels).
Row = tuple[int, int, int, int, int, int]
_EDGE = ((("er", 3, 2, 4, 48),),)
_STARTS = {
    "small": ((("cn", 3, 2, 1, 32), ("cn", 1, 1, 1, 32)), (("cn", 3, 2, 1, 96), ("cn", 1, 1, 1, 64))),
    "medium": _EDGE,
    "large": _EDGE,
}
_STAGES: dict[str, tuple[tuple[Row, ...], ...]] = {
    "small": (
        ((1, 5, 5, 2, 3, 96), (4, 0, 3, 1, 2, 96), (1, 3, 0, 1, 4, 96)),
        ((1, 3, 3, 2, 6, 128), (1, 5, 5, 1, 4, 128), (1, 0, 5, 1, 4, 128), (1, 0, 5, 1, 3, 128), (2, 0, 3, 1, 4, 128)),
    ),
    "medium": (
        ((1, 3, 5, 2, 4, 80), (1, 3, 3, 1, 2, 80)),
        ((1, 3, 5, 2, 6, 160), (2, 3, 3, 1, 4, 160), (1, 3, 5, 1, 4, 160), (1, 3, 3, 1, 4, 160), (1, 3, 0, 1, 4, 160),
         (1, 0, 0, 1, 2, 160), (1, 3, 0, 1, 4, 160)),
        ((1, 5, 5, 2, 6, 256), (1, 5, 5, 1, 4, 256), (2, 3, 5, 1, 4, 256), (1, 0, 0, 1, 4, 256), (1, 3, 0, 1, 4, 256),
         (1, 3, 5, 1, 2, 256), (1, 5, 5, 1, 4, 256), (2, 0, 0, 1, 4, 256), (1, 5, 0, 1, 2, 256)),
    ),
    "large": (
        ((1, 3, 5, 2, 4, 96), (1, 3, 3, 1, 4, 96)),
        ((1, 3, 5, 2, 4, 192), (3, 3, 3, 1, 4, 192), (1, 3, 5, 1, 4, 192), (5, 5, 3, 1, 4, 192), (1, 3, 0, 1, 4, 192)),
        ((4, 5, 5, 2, 4, 512), (1, 5, 0, 1, 4, 512), (1, 5, 3, 1, 4, 512), (2, 5, 0, 1, 4, 512), (1, 5, 3, 1, 4, 512),
         (1, 5, 5, 1, 4, 512), (3, 5, 0, 1, 4, 512)),
    ),
}  # fmt: skip
STEMS = {"small": 32, "medium": 32, "large": 24}
LAST, HEAD = 960, 1280  # channels of the last convolution, and of the layer behind the pooling
VARIANTS = {  # (sizes, factor of channels)
    "mobilenetv4_conv_small_035": ("small", 0.35),
    "mobilenetv4_conv_small_050": ("small", 0.5),
    "mobilenetv4_conv_small": ("small", 1.0),
    "mobilenetv4_conv_medium": ("medium", 1.0),
    "mobilenetv4_conv_large": ("large", 1.0),
}


class MobileNetV4(cnn.Folded):
    """config: of timm, see models/common/configs/timm_config.py. An image's vector is that before the classifier.

    Raises Unsupported, also for the hybrid models, which have attention.
    """

    prefix_tokens = 0
    norms = (("conv_stem", "bn1"), ("conv_head", "norm_head"))
    style = cnn.Style("relu")

    def __init__(self, config: Any) -> None:
        super().__init__()
        cnn.check_timm(config, tuple(VARIANTS))
        (size, factor), self.channels = VARIANTS[config.architecture], config.num_channels

        def wide(channels: int) -> int:
            return cnn.divisible(channels * factor)

        width = STEMS[size]
        self.conv_stem, self.bn1 = cnn.Conv(self.channels, width, 3, 2), cnn.BatchNorm(width)
        stages: list[nn.Module] = []
        for start in _STARTS[size]:
            blocks: list[nn.Module] = []
            for kind, window, stride, expansion, channels in start:
                out = wide(channels)
                if kind == "cn":
                    blocks.append(cnn.ConvBnAct(self.style, width, out, window, stride))
                else:
                    blocks.append(cnn.EdgeResidual(self.style, width, out, window, stride, expansion))
                width = out
            stages.append(nn.Sequential(*blocks))
        for rows in _STAGES[size]:
            blocks = []
            for repeats, first, middle, stride, expansion, channels in rows:
                for i in range(repeats):
                    out = wide(channels)
                    blocks.append(
                        cnn.UniversalInvertedResidual(
                            self.style, width, out, first, middle, 1 if i else stride, expansion
                        )
                    )
                    width = out
            stages.append(nn.Sequential(*blocks))
        last = wide(LAST)
        stages.append(nn.Sequential(cnn.ConvBnAct(self.style, width, last, 1, 1)))
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.norm_head = cnn.Conv(last, HEAD), cnn.BatchNorm(HEAD)
        self.num_labels = config.num_labels
        if self.num_labels:
            self.classifier = cnn.Classifier(HEAD, self.num_labels)

    def forward(self, patches: torch.Tensor, grids: cnn.Grids) -> torch.Tensor:
        return cnn.encode(patches, grids, self.channels, self.conv_stem.weight.dtype, self._features)

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(cnn.convolve(x, self.conv_stem, self.bn1, self.style, "relu"))

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        pooled = mean(hidden, starts)[:, :, None, None]
        return cnn.convolve(pooled, self.conv_head, self.norm_head, self.style, "relu").flatten(1)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(hidden, starts))


ARCH = Architecture(
    names=("MobileNetV4",),
    category="vision",
    model="MobileNetV4",
    runner="Encode",
    model_type="timm_mobilenetv4",
    timm=("mobilenetv4_",),
    inputs="images",
    packed={},
    unused=("*.num_batches_tracked",),
)
