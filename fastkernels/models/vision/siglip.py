"""SigLIP with its text tower left out, or with an image classifier; see siglip_vision.py."""

from __future__ import annotations

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.vision.siglip2 import Siglip2
from fastkernels.models.vision.siglip_vision import SiglipVisionModel


class Siglip(Siglip2):
    """config: transformers.SiglipConfig. The vision tower, with a classifier if the architecture has one."""

    tower_class = SiglipVisionModel

    def check_grid(self, grid: tuple[int, int]) -> None:
        self.vision_model.check_grid(grid)


ARCH = Architecture(
    names=("SiglipModel", "SiglipForImageClassification"),
    category="vision",
    model="Siglip",
    runner="Encode",
    model_type="siglip",
    inputs="images",
    unused=("text_model.*", "logit_scale", "logit_bias"),
)
