"""Decides when drafts cost more time than they save: by measured steps, and by the tokens that drafts have brought."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("fastkernels")
MEMORY = 512  # drafted sequences that an average of their tokens reaches back to
ENOUGH = 64  # of them, before the average counts
PAUSE = 256  # steps without drafts before they are tried again
TRIAL = 16  # steps of a trial


class Payoff:
    """Whether a step with drafts pays.

    ratios  {running sequences: time of a step with all drafts over that of one without}
    most    tokens that such a step can bring for a sequence
    num_off  steps that had no drafts for this reason
    """

    def __init__(self, ratios: Mapping[int, float], most: int):
        if not ratios:
            raise ValueError("no size was measured")
        self.ratios, self.most = dict(sorted(ratios.items())), most
        self.num_off = 0
        self._tokens, self._seen = float(most), 0
        self._off = 0  # steps in a row
        self._trial = 0  # steps that are left of it
        self._said: int | None = None

    def ratio(self, rows: int) -> float:
        """That of the smallest measured size with room for so many sequences, or of the largest one."""
        sizes = list(self.ratios)
        return self.ratios[next((size for size in sizes if size >= rows), sizes[-1])]

    @property
    def tokens(self) -> float:
        """Tokens of a drafted sequence in a step, on average; the most, until enough are seen."""
        return self._tokens if self._seen >= ENOUGH else float(self.most)

    @property
    def largest(self) -> int:
        """The largest measured number of sequences at which drafts pay now; 0: at none."""
        return max((size for size, ratio in self.ratios.items() if ratio < self.tokens), default=0)

    def pays(self, rows: int) -> bool:
        ratio = self.ratio(rows)
        return ratio < self.tokens or (self._trial > 0 and ratio < self.most)

    def count_step(self, rows: int) -> None:
        """Count a step with so many sequences. After a pause, drafts are tried again where they can pay at all."""
        if self._trial:
            self._trial -= 1
        if self.pays(rows):
            self._off = 0
            return
        self.num_off += 1
        self._off += 1
        if self._off >= PAUSE:
            self._off, self._trial = 0, TRIAL

    def count_tokens(self, tokens: int) -> None:
        """Count the tokens that a drafted sequence got from a step."""
        self._seen += 1
        share = 1.0 / min(self._seen, MEMORY)
        self._tokens += (tokens - self._tokens) * share
        if self._seen >= ENOUGH and self._seen % ENOUGH == 0 and self.largest != self._said:
            self._said = self.largest
            log.info(
                "speculative decoding: %.2f tokens of a sequence in a step; %s", self._tokens, self._where()
            )

    def describe(self) -> str:
        """The measurements, and where drafts are off, in one line."""
        times = ", ".join(f"{ratio:.2f} at {size}" for size, ratio in self.ratios.items())
        return (
            f"speculative decoding: a step with drafts takes {times} running sequences times one without;"
            f" {self._where()}"
        )

    def _where(self) -> str:
        if self.largest == list(self.ratios)[-1]:
            return "drafts are on at every size"
        if not self.largest:
            return "drafts are off: they lose at every size"
        return f"drafts are off above {self.largest} running sequences, where they lose"
