"""Cosine of mel spectrograms."""

from __future__ import annotations

import torch

from fk_bench.quality.metrics.metric import Metric, angle
from fk_bench.quality.metrics.outputs import Spectrograms


class MelCosine(Metric):
    name = "mel_cosine"
    formula = "mean over clips of cos(output, reference)"
    unit = "cosine"
    direction = "higher"
    families = ("audio",)

    def value(self, output: Spectrograms, reference: Spectrograms) -> float:
        mine, wanted = (x.mels.double().flatten(1) for x in (output, reference))
        return float(torch.cosine_similarity(mine, wanted, dim=-1).mean())

    def discrepancy(self, value: float, output: Spectrograms, reference: Spectrograms) -> float:
        return angle(value)
