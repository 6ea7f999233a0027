"""Prepare images as timm's checkpoints have it: resized, cropped at the center."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastkernels.models.common.configs.timm_config import Preprocessing


class TimmProcessor:
    """Called as an image processor of transformers: processor(images=PIL image, return_tensors="pt")."""

    def __init__(self, settings: Preprocessing):
        self.settings = settings

    @property
    def edge(self) -> int:
        """Pixels of the shorter side before the crop."""
        return math.floor(self.settings.size / self.settings.crop_pct)

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        """{"pixel_values": [1, 3, size, size]} in uint8, channels last in memory; pixels.Scale has the numbers."""
        import torch

        values = torch.from_numpy(np.array(self._cropped(images), np.uint8))
        return {"pixel_values": values.permute(2, 0, 1)[None]}

    def _cropped(self, image: Any) -> Any:
        from PIL import Image

        s, edge = self.settings, self.edge
        width, height = edge, edge
        if s.mode == "center" and image.width <= image.height:  # the shorter side gets that length
            height = int(edge * image.height / image.width)
        elif s.mode == "center":
            width = int(edge * image.width / image.height)
        wanted = width, height
        if wanted != image.size:
            image = image.resize(wanted, getattr(Image.Resampling, s.interpolation.upper()))
        left, top = (round((n - s.size) / 2) for n in wanted)
        return image.crop((left, top, left + s.size, top + s.size))
