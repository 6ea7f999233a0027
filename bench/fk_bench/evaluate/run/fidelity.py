"""Correctness of an item in [0, 1]: the discrepancy of its timed outputs, with the baseline's own as noise.

text      nats per token by which the baseline prefers its likeliest token to the one that was generated, after the
          same prefix: 0 for the greedy output of the same model. Tokens alone are believed, and a clean process scores
          them
logprobs  root mean square of the difference between a token's log probability where it was generated, and that of the
          baseline after the same prefix. Not timed: it sees errors that leave the likeliest token as it is
images    |found - wanted| / |wanted| of one call of each round, drawn after the round; of all outputs that are numbers
tokens    share of tokens that differ, of a diffusion language model
masks     1 - mean IoU of the objects of clips, by their numbers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fk_bench.quality.calibration import Calibration, correctness, fitted_bound, noise_of

UNITS = {
    "text": "nats per token", "logprobs": "nats of log probabilities", "images": "relative error",
    "tokens": "of the tokens", "masks": "of the mean IoU",
}  # fmt: skip
BOUNDS = {
    "text": 0.1,
    "logprobs": 0.1,
    "images": 0.1,
    "tokens": 0.5,
    "masks": 0.2,
}  # discrepancies at which correctness is 0


@dataclass(frozen=True)
class Fidelity:
    """correctness: 1 while the discrepancy is at most the noise, falling linearly to 0 at the bound."""

    kind: str
    discrepancy: float
    noise: float
    correctness: float
    bound: float

    def __str__(self) -> str:
        return (
            f"discrepancy {self.discrepancy:.3g} {UNITS[self.kind]}, the host's own {self.noise:.3g}: "
            f"correctness {self.correctness:.3f}"
        )


def fidelity(
    kind: str, found: Sequence[float], own: Sequence[float], scale: Calibration | None = None
) -> Fidelity:
    """found, own: discrepancies of the rounds, of the set and of the baseline itself. scale: of `calibration`."""
    noise = noise_of([min(d, 1.0) for d in own])
    bound = BOUNDS[kind]
    if scale is not None:
        noise, bound = max(noise, scale.noise), scale.bound
    discrepancy = float(np.mean(found))
    c = correctness(discrepancy, noise, bound) if noise < bound else float(discrepancy <= noise)
    return Fidelity(kind, discrepancy, noise, c, bound)


def calibration(
    kind: str, runs: Mapping[str, float], faults: Mapping[str, float], unplanted: Mapping[str, str]
) -> Calibration:
    """The scale of an item from discrepancies of the baseline from itself, and with planted faults.

    The bound is the kind's, or less: so that the smallest fault, if it is above the noise, gives c < 0.9.
    """
    noise = noise_of([min(d, 1.0) for d in runs.values()])
    bound = fitted_bound(BOUNDS[kind], noise, faults)
    return Calibration(noise, bound, dict(faults), dict(unplanted), dict(runs))
