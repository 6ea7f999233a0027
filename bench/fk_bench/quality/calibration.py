"""Calibrated correctness: a discrepancy becomes c in [0, 1] by the reference's own noise and its family's bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fk_bench.quality.metrics.metric import Value

THRESHOLD = 0.9  # the least c of a valid item; a planted fault must stay below it
SEEN = 9.9  # (bound - noise) / (fault - noise) at most: c of the fault is then below 0.9


def correctness(discrepancy: float, noise: float, bound: float) -> float:
    """Return 1 for a discrepancy up to the noise, falling linearly to 0 at the bound. NaN gives 0.

    Raises ValueError for a negative or undefined noise, and for a bound outside (0, 1].
    """
    if not 0 <= noise <= 1:
        raise ValueError(f"noise lies in [0, 1], got {noise}")
    if not 0 < bound <= 1:
        raise ValueError(f"bound lies in (0, 1], got {bound}")
    if not discrepancy < bound:  # NaN, too
        return 0.0
    return 1.0 if discrepancy <= noise else (bound - discrepancy) / (bound - noise)


def noise_of(discrepancies: Sequence[float]) -> float:
    """Return the 95th percentile of the reference's discrepancies from itself. Raises ValueError for none."""
    if not discrepancies or not all(0 <= d <= 1 for d in discrepancies):
        raise ValueError(f"noise needs discrepancies in [0, 1], got {list(discrepancies)}")
    return float(np.percentile(discrepancies, 95))


def fitted_bound(bound: float, noise: float, faults: Mapping[str, float]) -> float:
    """Return the bound, or a smaller one with which the smallest fault, if it is above the noise, gives c < 0.9."""
    if faults and (least := min(faults.values())) > noise:
        return min(bound, noise + SEEN * (least - noise))
    return bound


@dataclass(frozen=True)
class Calibration:
    """The scale of an item.

    faults     discrepancy of the reference with each planted fault
    unplanted  faults that could not be planted, and why; those that do not concern the model are left out
    runs       discrepancy of the reference from itself in each run; the noise is their 95th percentile
    """

    noise: float
    bound: float
    faults: Mapping[str, float] = field(default_factory=dict)
    unplanted: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, float] = field(default_factory=dict)

    def correctness(self, discrepancy: float) -> float:
        return correctness(discrepancy, self.noise, self.bound)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The planted faults that keep c at 0.9 or more."""
        return tuple(name for name, d in self.faults.items() if self.correctness(d) >= THRESHOLD)

    @property
    def sensitive(self) -> bool:
        """Whether all faults that concern the model were planted and seen, and the noise is below the bound."""
        return bool(self.faults) and not self.unseen and not self.unplanted and self.noise < self.bound


@dataclass(frozen=True)
class Quality:
    """The result of an item: the family's metric, calibrated, and all other metrics of the same outputs."""

    model: str
    host: str
    metric: str  # the one that c is made of
    values: Mapping[str, Value]
    calibration: Calibration
    calls: Mapping[str, int] = field(default_factory=dict)  # of the ops that the patch put in
    left: Mapping[str, str] = field(default_factory=dict)  # ops that it left to the host, and why
    exact: Mapping[str, float] = field(default_factory=dict)  # the metric against float32: 'host', 'patched'

    @property
    def c(self) -> float:
        return self.calibration.correctness(self.values[self.metric].discrepancy)

    @property
    def noise(self) -> float:
        return self.calibration.noise

    @property
    def sensitive(self) -> bool:
        return self.calibration.sensitive
