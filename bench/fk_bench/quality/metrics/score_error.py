"""Error of the scores of a recommender, relative to their deviation."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Ratings


class ScoreError(Metric):
    name = "score_error"
    formula = "RMS of output - reference / standard deviation of the reference"
    unit = "deviations"
    direction = "lower"
    families = ("encoding", "recommendation")

    def value(self, output: Ratings, reference: Ratings) -> float:
        mine, wanted = output.scores.double(), reference.scores.double()
        return float((mine - wanted).square().mean().sqrt() / wanted.std().clamp_min(1e-12))
