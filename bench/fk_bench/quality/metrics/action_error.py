"""Error of a policy's actions, relative to their range."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Actions


class ActionError(Metric):
    name = "action_error"
    formula = "mean of |output - reference| / (high - low)"
    unit = "share of the range"
    direction = "lower"
    families = ("policy",)

    def value(self, output: Actions, reference: Actions) -> float:
        gaps = (output.values.double() - reference.values.double()).abs()
        return float((gaps / (reference.high - reference.low).double()).mean())
