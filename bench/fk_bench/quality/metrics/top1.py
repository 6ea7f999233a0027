"""Agreement of the most probable tokens or classes."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Scores


class Top1(Metric):
    name = "top1"
    formula = "share of rows with argmax(output) = argmax(reference)"
    unit = "share"
    direction = "higher"
    families = ("text", "vision")

    def value(self, output: Scores, reference: Scores) -> float:
        return float((output.logits.argmax(-1) == reference.logits.argmax(-1)).double().mean())
