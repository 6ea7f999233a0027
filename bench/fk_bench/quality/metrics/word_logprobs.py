"""Error of the log probabilities of a transcript's words, as long as it has the reference's words."""

from __future__ import annotations

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Transcripts


class WordLogprobs(Metric):
    name = "word_logprobs"
    formula = (
        "RMS of log p(output) - log p(reference) over words up to the first that differs, which is included"
    )
    unit = "nats"
    direction = "lower"
    families = ("speech",)

    def value(self, output: Transcripts, reference: Transcripts) -> float:
        gaps: list[float] = []
        for i, (mine, wanted) in enumerate(zip(output.texts, reference.texts, strict=True)):
            pairs = list(zip(mine.split(), wanted.split(), strict=False))
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1) + 1
            found = output.logprobs[i, :same].double() - reference.logprobs[i, :same].double()
            gaps += found.square().tolist()
        return float((sum(gaps) / max(len(gaps), 1)) ** 0.5)
