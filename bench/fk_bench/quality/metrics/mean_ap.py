"""Mean average precision of detections, with the reference's as the truth."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Detections


class MeanAP(Metric):
    name = "mean_ap"
    formula = "COCO mAP over IoU 0.50 to 0.95 after matching"
    unit = "mAP"
    direction = "higher"
    families = ("detection", "objects")

    def value(self, output: Detections, reference: Detections) -> float:
        from torchmetrics.detection import MeanAveragePrecision

        found = MeanAveragePrecision()
        found.update(list(output.images), list(reference.images))
        value = float(found.compute()["map"])
        return max(value, 0.0)  # -1 without any true box
