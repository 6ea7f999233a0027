"""Peak signal-to-noise ratio of images."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Images


class PSNR(Metric):
    name = "psnr"
    formula = "10 log10(1 / mean squared error), at most 100"
    unit = "dB"
    direction = "higher"
    families = ("image", "pixels")

    def value(self, output: Images, reference: Images) -> float:
        from torchmetrics.functional.image import peak_signal_noise_ratio

        found = peak_signal_noise_ratio(
            output.pixels.double(), reference.pixels.double(), data_range=(0.0, 1.0)
        )
        return float(found.clamp(max=100.0))  # equal images

    def discrepancy(self, value: float, output: Images, reference: Images) -> float:
        return 0.0 if value >= 100 else float(10 ** (-value / 20))  # the root mean squared error
