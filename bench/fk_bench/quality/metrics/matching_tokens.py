"""Tokens that match before the first difference, with the context forced."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Scores


class MatchingTokens(Metric):
    name = "matching_tokens"
    formula = "mean over sequences of the share of leading steps with equal argmax"
    unit = "share"
    direction = "higher"
    families = ("text",)

    def value(self, output: Scores, reference: Scores) -> float:
        same = (output.logits.argmax(-1) == reference.logits.argmax(-1)).long()
        found = [float(steps.cumprod(0).sum()) / len(steps) for steps in same.split(list(output.lengths))]
        return sum(found) / len(found)
