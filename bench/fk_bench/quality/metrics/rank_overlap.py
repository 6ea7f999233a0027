"""Overlap of the 20 most probable tokens."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Scores


class RankOverlap(Metric):
    name = "rank_overlap"
    formula = "mean over rows and depths d = 1..20 of |top_d(output) & top_d(reference)| / d"
    unit = "share"
    direction = "higher"
    families = ("text",)

    def value(self, output: Scores, reference: Scores) -> float:
        depth = min(20, output.logits.shape[-1])
        mine, wanted = (x.logits.topk(depth).indices for x in (output, reference))  # [n, depth]
        same = mine[:, :, None] == wanted[:, None, :]  # [n, depth, depth]
        found = [same[:, :d, :d].sum((1, 2)).double().mean() / d for d in range(1, depth + 1)]
        return float(sum(found) / depth)
