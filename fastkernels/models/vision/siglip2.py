"""SigLIP 2 with its text tower left out, or with an image classifier; see siglip2_vision.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.vision.dinov3 import Grids
from fastkernels.models.vision.siglip2_vision import Replicated, Siglip2VisionModel, mean


class Siglip2(nn.Module):
    """config: transformers.Siglip2Config. The vision tower, with a classifier if the architecture has one."""

    prefix_tokens = 0
    tower_class = Siglip2VisionModel
    vision_model: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.vision_model = self.tower_class(config.vision_config)
        classifies = any(name.endswith("ForImageClassification") for name in config.architectures)
        self.num_labels = config.num_labels if classifies else 0
        if self.num_labels:
            self.classifier = Replicated(config.vision_config.hidden_size, self.num_labels)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        return self.vision_model(patches, grids)

    def pool(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.vision_model.pool(hidden, starts)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.classifier(mean(hidden, starts))


ARCH = Architecture(
    names=("Siglip2Model", "Siglip2ForImageClassification"),
    category="vision",
    model="Siglip2",
    runner="Encode",
    model_type="siglip2",
    inputs="images",
    unused=("text_model.*", "logit_scale", "logit_bias"),
)
