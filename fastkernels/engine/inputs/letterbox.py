"""Prepare images as ultralytics' models have it: the whole image, scaled, in the middle of a gray one."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastkernels.models.common.configs.ultralytics_config import Letterbox


class LetterboxProcessor:
    """Called as an image processor of transformers: processor(images=PIL image, return_tensors="pt").

    The longer side gets settings.size pixels. The other one is filled up to a multiple of settings.stride.
    """

    def __init__(self, settings: Letterbox):
        self.settings = settings

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        """{"pixel_values": [1, 3, rows, columns] uint8, "view": see images.Patches}; pixels.Scale has the numbers."""
        import torch
        import torch.nn.functional as F

        s, (width, height) = self.settings, images.size
        scale = min(s.size / width, s.size / height)
        columns, rows = (max(round(n * scale), 1) for n in (width, height))
        pixels = torch.from_numpy(np.array(images, np.uint8)).permute(2, 0, 1)[None]
        if (columns, rows) != (
            width,
            height,
        ):  # as bytes: a large image in float32 needs four times the memory
            pixels = F.interpolate(pixels, (rows, columns), mode="bilinear", align_corners=False)
        spare_x, spare_y = -columns % s.stride, -rows % s.stride
        left, top = (round(n / 2 - 0.1) for n in (spare_x, spare_y))
        pixels = F.pad(pixels, (left, spare_x - left, top, spare_y - top), value=s.fill)
        view = (-left / scale, -top / scale, (columns + spare_x) / scale, (rows + spare_y) / scale)
        return {"pixel_values": pixels, "view": view}
