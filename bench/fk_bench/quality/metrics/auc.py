"""Area under the ROC curve of recommendations."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Ratings


class AUC(Metric):
    name = "auc"
    formula = "probability that a taken item has a higher score than one that was not; taken are the reference's labels"
    unit = "AUC"
    direction = "higher"
    families = ("recommendation",)

    def value(self, output: Ratings, reference: Ratings) -> float:
        from torchmetrics.functional.classification import binary_auroc

        # Ranks, with ties: torchmetrics applies a sigmoid to scores outside [0, 1].
        _, ranks = output.scores.unique(return_inverse=True)
        return float(binary_auroc(ranks.double() / len(ranks), reference.labels.long()))
