"""Structural similarity of images."""

from __future__ import annotations

import torch

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Images


class SSIM(Metric):
    name = "ssim"
    formula = "SSIM, Gaussian window of 11 pixels, values in [0, 1]"
    unit = "SSIM"
    direction = "higher"
    families = ("image", "pixels")

    def value(self, output: Images, reference: Images) -> float:
        from torchmetrics.functional.image import structural_similarity_index_measure

        found = structural_similarity_index_measure(
            output.pixels.double(), reference.pixels.double(), data_range=1.0
        )
        assert isinstance(found, torch.Tensor)
        return float(found)
