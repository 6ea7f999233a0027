"""Kullback-Leibler divergence of distributions over tokens or classes."""

from __future__ import annotations

import math

import torch

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Scores


class KL(Metric):
    name = "kl"
    formula = "mean over rows of KL(softmax(reference) || softmax(output))"
    unit = "nats"
    direction = "lower"
    families = ("text", "vision")

    def value(self, output: Scores, reference: Scores) -> float:
        p, q = (x.logits.double().log_softmax(-1) for x in (reference, output))
        gaps = torch.where(p.isneginf(), 0.0, p - q)  # masked in both
        return max(float((p.exp() * gaps).sum(-1).mean()), 0.0)

    def discrepancy(self, value: float, output: Scores, reference: Scores) -> float:
        return math.sqrt(value / 2)  # at least the total variation of the mean row (Pinsker)
