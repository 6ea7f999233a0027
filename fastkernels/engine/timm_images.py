"""Prepare images as timm's checkpoints have it: resized, cropped at the center, normalized."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastkernels.models.common.timm_config import Preprocessing


class TimmProcessor:
    """Called as an image processor of transformers: processor(images=PIL image, return_tensors="pt")."""

    def __init__(self, settings: Preprocessing):
        self.settings = settings

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        """{"pixel_values": [1, 3, size, size]} in float32."""
        import torch

        s = self.settings
        values = np.asarray(self._cropped(images), np.float32) / np.float32(255)
        values = (values - np.array(s.mean, np.float32)) / np.array(s.std, np.float32)
        return {"pixel_values": torch.from_numpy(values).permute(2, 0, 1)[None]}

    def _cropped(self, image: Any) -> Any:
        from PIL import Image

        s, edge = self.settings, math.floor(self.settings.size / self.settings.crop_pct)
        shorter = min(image.size)
        if s.mode == "squash":
            wanted = edge, edge
        else:  # the shorter side gets that length
            wanted = tuple(edge if n == shorter else int(edge * n / shorter) for n in image.size)
        if wanted != image.size:
            image = image.resize(wanted, getattr(Image.Resampling, s.interpolation.upper()))
        left, top = (round((n - s.size) / 2) for n in wanted)
        return image.crop((left, top, left + s.size, top + s.size))
