"""Perplexity of the true tokens, relative to the reference's."""

from __future__ import annotations

import math

import torch.nn.functional as F

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Scores


class Perplexity(Metric):
    name = "perplexity"
    formula = "exp(mean of -log p(target)) / the reference's"
    unit = "ratio"
    direction = "lower"
    families = ("text",)

    def value(self, output: Scores, reference: Scores) -> float:
        mine, base = (F.cross_entropy(x.logits.double(), x.targets) for x in (output, reference))
        return float((mine - base).exp())

    def discrepancy(self, value: float, output: Scores, reference: Scores) -> float:
        return abs(math.log(value)) if value > 0 else 1.0
