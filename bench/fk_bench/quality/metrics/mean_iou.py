"""Mean intersection over union of segmentations, with the reference's as the truth."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Masks


class MeanIoU(Metric):
    name = "mean_iou"
    formula = "mean over classes that occur of |A & B| / |A | B|"
    unit = "IoU"
    direction = "higher"
    families = ("segmentation", "tracking")

    def value(self, output: Masks, reference: Masks) -> float:
        from torchmetrics.functional.segmentation import mean_iou

        found = mean_iou(
            output.classes[None].flatten(1),
            reference.classes[None].flatten(1),
            output.count,
            per_class=True,
            input_format="index",
        )
        return float(found[found >= 0].mean())  # -1: a class that does not occur
