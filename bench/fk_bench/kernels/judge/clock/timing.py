"""From batches on the judge's clock to times: the slope between N and 2N calls, and the reasons for invalid times."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fk_bench.kernels.judge.clock import roofline

TRACED_S = 1e-6  # a traced call may take so much longer, because its kernels are stamped one by one
STARTING_S = 3e-7  # per call: the start of a batch may cost one side so much more than the other
APART = 0.05  # allowed difference between the judge's clock and the runner's events, in addition to noise


@dataclass
class Samples:
    """Batches of one side: seconds of n and of 2n calls, on the judge's clock and by the runner's events."""

    n: int
    single: list[float] = field(default_factory=list)
    double: list[float] = field(default_factory=list)
    events_single: list[float] = field(default_factory=list)
    events_double: list[float] = field(default_factory=list)

    def add(self, double: bool, seconds: float, events: float | None) -> None:
        (self.double if double else self.single).append(seconds)
        if events is not None:
            (self.events_double if double else self.events_single).append(events)

    @property
    def slopes(self) -> np.ndarray:
        """Seconds per call, one value per round."""
        return (np.array(self.double) - np.array(self.single)) / self.n

    @property
    def time(self) -> float:
        return float(np.median(self.slopes))

    @property
    def intercept(self) -> float:
        """Cost of a batch apart from its calls: starting, finishing, and reading the outputs."""
        return float(np.median(2 * np.array(self.single) - np.array(self.double)))

    @property
    def spread(self) -> float:
        """The standard error of the median slope, by the median absolute deviation."""
        mad = float(np.median(np.abs(self.slopes - self.time)))
        return 1.4826 * mad * 1.25 / len(self.single) ** 0.5

    def percentiles(self) -> dict[str, float]:
        p20, p50, p80 = np.percentile(self.slopes, (20, 50, 80))
        return {"p20": 1e6 * float(p20), "p50": 1e6 * float(p50), "p80": 1e6 * float(p80)}


def unsteady(candidate: Samples, baseline: Samples, again: Samples) -> str:
    """Why these batches give no time; '' if they do. Unsteady times get no credit."""
    for who, s in (("the baseline's", baseline), ("the baseline's", again), ("the candidate's", candidate)):
        if s.spread > 0.3 * abs(s.time) or (s.time <= 0 and not s.events_single):
            return f"{who} times scatter too much: {1e6 * s.time:.1f} +- {1e6 * s.spread:.1f} us per call"
    return ""


def invalid(candidate: Samples, baseline: Samples, floor_s: float, busy_s: float | None = None) -> str:
    """Why the candidate's time must not be used; '' if it may.

    floor_s  lower bound of a correct call on this machine; 0 if unknown
    busy_s   seconds of a call in which CUPTI saw a kernel on any stream
    """
    time, noise = candidate.time, 3 * candidate.spread
    if time <= 0:
        return (
            f"twice the calls take no longer ({1e6 * time:.2f} us per call): the clock sees none of the work"
        )
    if problem := roofline.too_fast(1e6 * time, 1e6 * floor_s or None):
        return problem
    if candidate.events_single:
        events = Samples(candidate.n, candidate.events_single, candidate.events_double)
        if abs(events.time - time) > APART * time + noise + 3 * events.spread + 2e-7:
            return (
                f"the process's own events show {1e6 * events.time:.2f} us per call, "
                f"the judge's clock {1e6 * time:.2f} us"
            )
    if busy_s is not None and busy_s > time * (1 + APART) + noise + TRACED_S:
        return f"CUPTI saw kernels for {1e6 * busy_s:.2f} us per call, the judge's clock {1e6 * time:.2f} us"
    return ""


def charge(candidate: Samples, baseline: Samples) -> float:
    """Seconds to add to the time of a call because a batch has more overhead on the candidate's side than on the
    baseline's; 0 if noise explains the difference.

    With it, the time of a call is that of the shorter batch minus the baseline's overhead, so slowing the shorter batch
    or speeding up the longer one gains nothing.
    """
    extra = candidate.intercept - max(baseline.intercept, 0.0)
    allowed = max(0.1 * candidate.time, STARTING_S) + 3 * (candidate.spread + baseline.spread)
    late = extra / candidate.n > allowed and extra > 0.1 * max(baseline.intercept, 2e-4)
    return extra / candidate.n if late else 0.0


def speedup(
    candidate: Samples, baseline: Samples, charged: float = 0.0, draws: int = 2000
) -> tuple[float, tuple[float, float]]:
    """median(baseline) / median(candidate), and its 95% bootstrap interval over rounds (paired by round).

    charged  seconds that are added to each of the candidate's times
    """
    a, b = candidate.slopes + charged, baseline.slopes
    rng = np.random.default_rng(0)
    rounds = rng.integers(0, len(a), (draws, len(a)))
    below = np.median(a[rounds], axis=1)
    ratios = np.median(b[rounds], axis=1)[below > 0] / below[below > 0]
    value = float(np.median(b) / np.median(a))
    if not len(ratios):
        return value, (value, value)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return value, (float(low), float(high))


def floor_s(size: int, work: int, dtype: str, gpu: str | None) -> float:
    """Lower bound of a correct call on this GPU in seconds; 0 if unknown."""
    return 1e-6 * (roofline.floor_us(size, work, dtype, roofline.peaks(gpu)) or 0.0)
