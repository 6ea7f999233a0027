"""Correctness of an item in [0, 1]: the discrepancy of its timed outputs, with the baseline's own as noise.

text    nats per token by which the baseline prefers its likeliest token to the one that was generated, after the same
        prefix: 0 for the greedy output of the same model. Tokens alone are believed, and a clean process scores them
images  |found - wanted| / |wanted| of one call of each round, drawn after the round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fk_bench.quality.calibration import correctness, noise_of

UNITS = {"text": "nats per token", "images": "relative error"}
BOUNDS = {"text": 0.1, "images": 0.1}  # discrepancies at which correctness is 0


@dataclass(frozen=True)
class Fidelity:
    """correctness: 1 while the discrepancy is at most the noise, falling linearly to 0 at the bound."""

    kind: str
    discrepancy: float
    noise: float
    correctness: float

    def __str__(self) -> str:
        return (
            f"discrepancy {self.discrepancy:.3g} {UNITS[self.kind]}, the host's own {self.noise:.3g}: "
            f"correctness {self.correctness:.3f}"
        )


def fidelity(kind: str, found: Sequence[float], own: Sequence[float]) -> Fidelity:
    """found, own: discrepancies of the rounds, of the set and of the baseline itself."""
    noise = noise_of([min(d, 1.0) for d in own])
    discrepancy = float(np.mean(found))
    return Fidelity(kind, discrepancy, noise, correctness(discrepancy, noise, BOUNDS[kind]))
