"""SigLIP's vision tower (Zhai et al., arXiv 2303.15343), also of the SigLIP 2 checkpoints with images of one size.

The interface is that of dinov3.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.models.vision.dinov3 import Grids, PatchEmbedding
from fastkernels.models.vision.siglip2_vision import Siglip2VisionModel


class SiglipVisionEmbeddings(nn.Module):
    """Patches plus position embeddings of the one grid that the model was made for."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.side = size_of(config, "image_size") // size_of(config, "patch_size")
        self.patch_embedding = PatchEmbedding(config)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        return self.patch_embedding(patches) + self.position_embedding.weight.repeat(len(grids), 1)


class SiglipVisionModel(Siglip2VisionModel):
    """config: transformers.SiglipVisionConfig. Raises Unsupported."""

    embeddings_class = SiglipVisionEmbeddings

    def check_grid(self, grid: tuple[int, int]) -> None:
        """Raise ValueError for an image of another number of patches."""
        p, side = self.config.patch_size, self.embeddings.side
        if grid != (side, side):
            raise ValueError(
                f"the prompt has {grid[1] * p} x {grid[0] * p} pixels after the image processor, and this model"
                f" takes {side * p} x {side * p}: set `size` in preprocessor_config.json"
            )


ARCH = Architecture(
    names=("SiglipVisionModel",),
    category="vision",
    model="SiglipVisionModel",
    runner="Encode",
    model_type="siglip_vision_model",
    inputs="images",
    renamed={"vision_model.": ""},
)
