"""Word error rate of transcripts against the reference's."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Transcripts


class WordErrorRate(Metric):
    name = "word_error_rate"
    formula = "(substitutions + deletions + insertions) / words of the reference"
    unit = "rate"
    direction = "lower"
    families = ("speech",)

    def value(self, output: Transcripts, reference: Transcripts) -> float:
        from torchmetrics.functional.text import word_error_rate

        return float(word_error_rate(list(output.texts), list(reference.texts)))
