"""Cosine of latents."""

from __future__ import annotations

import torch

from fk_bench.quality.metrics.metric import Metric, angle
from fk_bench.quality.metrics.outputs import Images


class LatentCosine(Metric):
    name = "latent_cosine"
    formula = "mean over images of cos(output, reference)"
    unit = "cosine"
    direction = "higher"
    families = ("image",)

    def value(self, output: Images, reference: Images) -> float:
        mine, wanted = (x.latents.double().flatten(1) for x in (output, reference))
        return float(torch.cosine_similarity(mine, wanted, dim=-1).mean())

    def discrepancy(self, value: float, output: Images, reference: Images) -> float:
        return angle(value)
