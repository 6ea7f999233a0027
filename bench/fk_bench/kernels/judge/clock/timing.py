"""From requests on the judge's clock to times, and the reasons for invalid times.

On a GPU the time of a call is the slope between batches of N and 2N calls. On a CPU every call is made alone, and the
time of a request without a call is subtracted: a slope between 0 and 1 calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fk_bench.core.stats import t975
from fk_bench.kernels.judge.clock import roofline

TRACED_S = 1e-6  # a traced call may take so much longer, because its kernels are stamped one by one
STARTING_S = 3e-7  # per call: the start of a batch may cost one side so much more than the other
SCATTER = 0.3  # times are steady up to this standard error, relative
# A call alone may cost so much more than in a batch, relative and in seconds: until the judge has read its outputs, and
# until it reports its end. Calls that wait for each other overlap at their ends only, which explains no factor of two.
# Without a producer, kernels that start early in a batch cost up to 1.5 us more alone.
ALONE, PASSED = (1.0, 5e-6), (1.0, 1.5e-6)
COUNTED = 0.3, 1e-6  # behind a producer: from here on the time alone is counted
# A call alone may report its end so much before the slopes explain it, relative to the baseline's time and in seconds.
# In 344 cases of an H200 and H100s honest calls came up to 8 us or 5% before; a report in front of a call came 152 us.
EARLY = 0.5, 2e-5
# From MANY samples on, each of these quantiles must show it: where times have two modes, a median may be in either.
QUANTILES, MANY = (0.1, 0.25, 0.5), 48
SIGMAS = 2.0  # of a quantile, on both sides
GIVEN, GIVEN_S = 0.02, 5e-6  # the judge's copy of the inputs may take so much longer on the candidate's side
SHORT_S = 2e-5  # a longer call is not too short for the clock: other work of the machine disturbs it
RESOLVED = 6.0  # standard errors: a time that is shorter on both sides says too little
APART = 0.05  # allowed difference between the judge's clock and the runner's events, in addition to noise


@dataclass
class Samples:
    """Batches of one side on the judge's clock; each round has a short and a long batch.

    n       calls of a short batch, unless `short_n` has the number of each; a long one has twice as many or `long_n`
    single, double  seconds of short and of long batches; events_*: the same by the process's own events
    alone   seconds of requests for one call, whose inputs alone were fresh, without `given`
    passed  seconds from the opened gate until the queued call reported its end (GPU)
    produced  whether a producer ran between gate and call
    given   seconds in which the judge copied the inputs of a batch (GPU); part of the batch's time
    """

    n: int
    single: list[float] = field(default_factory=list)
    double: list[float] = field(default_factory=list)
    events_single: list[float] = field(default_factory=list)
    events_double: list[float] = field(default_factory=list)
    short_n: list[int] = field(default_factory=list)
    long_n: list[int] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)
    produced: bool = False

    def add(self, double: bool, seconds: float, events: float | None, count: int | None = None) -> None:
        (self.double if double else self.single).append(seconds)
        if count is not None:
            (self.long_n if double else self.short_n).append(count)
        if events is not None:
            (self.events_double if double else self.events_single).append(events)

    def add_call(self, seconds: float, empty: float) -> None:
        """Add a call that was made alone, and a request without a call."""
        self.add(False, empty, None, 0)
        self.add(True, seconds, None, 1)

    @property
    def shorts(self) -> np.ndarray:
        """Calls of each short batch."""
        return np.array(self.short_n or [self.n] * len(self.single))

    @property
    def longs(self) -> np.ndarray:
        return np.array(self.long_n or [2 * self.n] * len(self.double))

    @property
    def slopes(self) -> np.ndarray:
        """Seconds per call, one value per round."""
        return (np.array(self.double) - np.array(self.single)) / (self.longs - self.shorts)

    @property
    def time(self) -> float:
        return float(np.median(self.slopes))

    @property
    def intercept(self) -> float:
        """Cost of a batch apart from its calls: starting, finishing, and reading the outputs."""
        return float(np.median(np.array(self.single) - self.shorts * self.slopes))

    @property
    def overhead(self) -> float:
        """Cost of a batch apart from its calls: the intercept, or that of a request for one call if it is larger."""
        if not self.alone:
            return self.intercept
        copies = float(np.median(self.given)) if self.given else 0.0
        return max(self.intercept, float(np.median(self.alone)) - self.time + copies, 0.0)

    @property
    def spread(self) -> float:
        """The standard error of the median slope, by the median absolute deviation."""
        return _error(list(self.slopes))

    @property
    def steady(self) -> bool:
        return self.time > 0 and self.spread <= SCATTER * self.time

    def percentiles(self) -> dict[str, float]:
        p20, p50, p80 = np.percentile(self.slopes, (20, 50, 80))
        return {"p20": 1e6 * float(p20), "p50": 1e6 * float(p50), "p80": 1e6 * float(p80)}


def unsteady(baseline: Samples, again: Samples) -> str:
    """Why the machine was too busy for a time; '' if it was not.

    Only the baseline's batches count: a candidate whose own times scatter must not lose a case in which it is slow.
    """
    for s in (baseline, again):
        if not s.steady:
            return f"the baseline's times scatter too much: {1e6 * s.time:.1f} +- {1e6 * s.spread:.1f} us per call"
    return ""


def unresolved(candidate: Samples, baseline: Samples) -> str:
    """Why the clock cannot tell a call of this case from none; '' if it can.

    It needs the baseline's scatter: a candidate cannot leave a case untimed by its own.
    """
    least = min(candidate.spread, 3 * baseline.spread)
    if not candidate.shorts.any() and abs(candidate.time) < RESOLVED / 2 * least:
        return (
            f"calls are too short for the clock: the candidate's take {1e6 * candidate.time:.1f} +- "
            f"{1e6 * candidate.spread:.1f} us"
        )
    if candidate.spread > 3 * baseline.spread:
        return ""
    if any(s.time >= RESOLVED * s.spread for s in (candidate, baseline)):
        return ""
    shown = " and ".join(f"{1e6 * s.time:.1f} +- {1e6 * s.spread:.1f} us" for s in (baseline, candidate))
    long = max(candidate.time, baseline.time) >= SHORT_S
    why = "the times scatter too much" if long else "calls are too short for the clock"
    return f"{why}: the baseline's and the candidate's take {shown}"


def invalid(
    candidate: Samples, baseline: Samples, floor_s: float, busy_s: float | None = None,
    launches: float | None = None,
) -> str:  # fmt: skip
    """Return why the candidate's time is invalid, '' if it is valid. Its own scatter beyond the baseline's widens no
    allowance.

    floor_s   lower bound of a correct call on this machine; 0 if unknown
    busy_s    seconds of a call in which CUPTI saw a kernel on any stream
    launches  kernels of a call that CUPTI saw
    """
    time, noise = candidate.time, 3 * baseline.spread
    if time <= 0 and candidate.spread <= SCATTER * abs(baseline.time):
        return (
            f"twice the calls take no longer ({1e6 * time:.2f} us per call): the clock sees none of the work"
        )
    if time > 0 and candidate.shorts.any() and _low(candidate) <= 0 < _low(baseline):
        return f"a fifth of its times are not positive: {1e6 * _low(candidate):.2f} us per call"
    if time <= 0:
        return f"its times scatter too much: {1e6 * time:.1f} +- {1e6 * candidate.spread:.1f} us per call"
    if problem := roofline.too_fast(1e6 * time, 1e6 * floor_s or None):
        return problem
    if problem := batched(candidate, baseline) or reported_early(candidate, baseline):
        return problem
    if candidate.events_single:
        mine = min(candidate.spread, 3 * baseline.spread)
        noise_of_both = 3 * (mine**2 + baseline.spread**2) ** 0.5
        events = Samples(
            candidate.n, candidate.events_single, candidate.events_double, short_n=candidate.short_n,
            long_n=candidate.long_n,
        )  # fmt: skip
        if abs(events.time - time) > APART * time + noise_of_both + 2e-7:
            return (
                f"the process's own events show {1e6 * events.time:.2f} us per call, "
                f"the judge's clock {1e6 * time:.2f} us"
            )
    if busy_s is not None:
        # Under CUPTI calls do not overlap. Where calls alone are counted, the score has that time, so a process whose
        # trace shows more than it is still refused: work outside the clock, on another stream, after the end or for
        # another call gains nothing. Beyond twice the slope calls are batched: a long gate widens nothing further.
        alone = counted_alone(candidate, baseline)
        shown = time if alone is None else min(time + alone.of(0.0), (1 + PASSED[0]) * time)
        if busy_s > shown * (1 + APART) + noise + TRACED_S:
            clock = "the judge's clock" if alone is None else "the judge's clock of calls alone"
            return f"CUPTI saw kernels for {1e6 * busy_s:.2f} us per call, {clock} {1e6 * shown:.2f} us"
    if launches is not None and launches < 1:
        return f"CUPTI saw {launches:.2f} kernels per call: some calls launch none"
    return ""


def batched(candidate: Samples, baseline: Samples, suspected: bool = False) -> str:
    """Why the calls of a batch are not independent; '' if a call alone costs less than twice what the slope explains.

    suspected  also if more samples may still explain it by chance
    """
    for own, other, allowed in (
        (candidate.alone, baseline.alone, ALONE), (candidate.passed, baseline.passed, PASSED),
    ):  # fmt: skip
        if extra := _exceeds(candidate, baseline, own, other, allowed, suspected):
            return (
                f"batched: a call alone takes {1e6 * (candidate.time + extra):.1f} us, in a batch "
                f"{1e6 * candidate.time:.1f} us"
            )
    return ""


def reported_early(candidate: Samples, baseline: Samples) -> str:
    """Why the reported ends of calls alone cannot be true; '' if they can. A call costs alone what it costs in a batch,
    and the baseline's calls overlap in a batch at their ends only.
    """
    own, other = candidate.passed, baseline.passed
    if min(len(own), len(other)) < 3:
        return ""
    ahead = _longer(other, own, SIGMAS) + candidate.time - baseline.time
    noise = (_error(other) ** 2 + baseline.spread**2) ** 0.5
    if ahead <= max(EARLY[0] * baseline.time, EARLY[1]) + 5 * noise:
        return ""
    return f"a call alone reports its end {1e6 * ahead:.0f} us before the times of batches explain it"


@dataclass(frozen=True)
class Alone:
    """Calls alone are counted, on both sides: seconds that are added to the slopes.

    extra  that a call of the candidate takes longer than its slope explains
    both   added to both sides: where a call alone is faster than the baseline's, what the baseline's takes longer than
           its slope, the gate included. So a baseline whose calls overlap as well is counted alone, too. Where it is
           slower, 0: a longer time of both would make it look better
    error  standard error of the difference between the sides
    """

    extra: float
    both: float
    error: float

    def of(self, charged: float) -> float:
        """Seconds to add to the candidate's slope, of which so many are charged anyway."""
        return max(self.extra, charged) + self.both


def counted_alone(candidate: Samples, baseline: Samples, suspected: bool = False) -> Alone | None:
    """How to count calls alone; None if the slope counts, because a call alone costs what it explains.

    Honest calls overlap at their ends: where one leaves multiprocessors idle the next begins. So do those of a kernel
    that does a part of another call's work; by the time alone neither gains. suspected: as for `batched`.
    """
    own, other = candidate.passed, baseline.passed
    if not candidate.produced or not _exceeds(candidate, baseline, own, other, COUNTED, suspected):
        return None
    slower = float(np.median(own) - np.median(other))
    both = max(float(np.median(other)) - baseline.time, 0.0) if slower < 0 else 0.0
    error = float(np.hypot(_error(own), _error(other)))
    return Alone(slower - (candidate.time - baseline.time), both, error)


def _exceeds(
    candidate: Samples, baseline: Samples, own: list[float], other: list[float], allowed: tuple[float, float],
    suspected: bool,
) -> float:  # fmt: skip
    """Seconds by which calls alone take longer than the slope explains, 0 if they are allowed or chance explains them.

    Requests and graphs have the same cost for both sides, so only the difference between the sides counts. `passed` is
    the more precise of the two, but the side itself reports the end.

    own, other  calls alone of candidate and baseline
    allowed     (relative, seconds)
    """
    if min(len(own), len(other)) < 3:
        return 0.0
    explained = candidate.time - baseline.time
    extra = _longer(own, other) - explained
    mine = min(_error(own), 3 * _error(other))  # its own scatter must not widen the allowance much
    noise = (mine**2 + _error(other) ** 2 + baseline.spread**2) ** 0.5
    few = min(len(own), len(other)) < MANY
    if extra <= max(allowed[0] * candidate.time, allowed[1], 5 * noise if few else 0.0):
        return 0.0
    sure = _longer(own, other, SIGMAS) > explained + SIGMAS * baseline.spread
    return extra if suspected or sure else 0.0


def _longer(own: list[float], other: list[float], sigmas: float = 0.0) -> float:
    """Seconds by which `own` exceeds `other` at the quantile where it exceeds it least; with few samples, the medians'
    difference.

    sigmas  a lower bound: own's quantile is so many standard errors lower and other's higher. It holds for every
            distribution, and the scatter of `own` cannot bring it below its shortest time
    """
    n = min(len(own), len(other))
    if n < MANY:
        return float(np.median(own) - np.median(other))
    q = np.array(QUANTILES)
    width = sigmas * np.sqrt(q * (1 - q) / n)
    return float((np.quantile(own, np.maximum(q - width, 0)) - np.quantile(other, q + width)).min())


def _low(samples: Samples) -> float:
    return float(np.percentile(samples.slopes, 20))


def _error(values: list[float]) -> float:
    """The standard error of the median, by the median absolute deviation."""
    mad = float(np.median(np.abs(np.array(values) - np.median(values))))
    return 1.4826 * mad * 1.25 / len(values) ** 0.5


def charge(candidate: Samples, baseline: Samples) -> float:
    """Seconds to add to the time of a call because a batch has more overhead on the candidate's side than on the
    baseline's; 0 if noise explains the difference.

    With it, the time of a call is that of the shorter batch minus the baseline's overhead, so slowing the shorter batch
    or speeding up the longer one gains nothing. Work that slows the judge's copy of the inputs is charged as well.
    """
    calls = float(np.median(candidate.shorts))
    if not calls:  # both sides' times have the same requests without a call
        return 0.0
    extra = candidate.intercept - baseline.overhead
    allowed = max(0.1 * min(candidate.time, baseline.time), STARTING_S) + 3 * baseline.spread * 2**0.5
    late = extra / calls > allowed and extra > 0.1 * max(baseline.overhead, 2e-4)
    charged = extra / calls if late else 0.0
    if candidate.given and baseline.given:
        own, other = float(np.median(candidate.given)), float(np.median(baseline.given))
        if own > other * (1 + GIVEN) + GIVEN_S:
            charged = max(charged, (own - other) / calls)
    return charged


@dataclass(frozen=True)
class Speedup:
    """value = time of the baseline / time of the candidate, with its 95% interval.

    again  the baseline's second set of batches against its first: 1.0 on a quiet machine
    time   seconds of the candidate's call that were counted
    """

    value: float
    interval: tuple[float, float]
    again: float
    time: float

    @property
    def significant(self) -> bool:
        return not self.interval[0] <= 1 <= self.interval[1]


def speedup(
    candidate: Samples, baseline: Samples, again: Samples, charged: float = 0.0, draws: int = 2000,
    alone: Alone | None = None,
) -> Speedup:  # fmt: skip
    """The speedup over both sets of the baseline's batches.

    The interval has the scatter of both sides (the larger of a bootstrap's, paired by round, and Student's) and the
    difference between the two sets, which a busy machine causes. charged: seconds added to each time of the candidate;
    alone: both sides' calls alone are counted.
    """
    alone = alone or Alone(0.0, 0.0, 0.0)
    a = candidate.slopes + alone.of(charged)
    b = (baseline.slopes + again.slopes) / 2 + alone.both
    # A candidate that scatters is counted at its 80th percentile: jitter must not gain.
    counted = float(np.median(a)) if candidate.steady else float(np.percentile(a, 80))
    value = float(np.median(b)) / counted
    rng = np.random.default_rng(0)
    rounds = rng.integers(0, len(a), (draws, len(a)))
    above, below = np.median(b[rounds], axis=1), np.median(a[rounds], axis=1)
    logs = np.log(above[(below > 0) & (above > 0)] / below[(below > 0) & (above > 0)])
    low, high = np.percentile(logs, (2.5, 97.5)) if len(logs) else (0.0, 0.0)
    t = t975(max(len(a) - 1, 1))
    between = abs(np.log(again.time / baseline.time)) * 0.75**0.5  # of a side and the mean of two
    errors = (
        candidate.spread / counted, (baseline.spread + again.spread) / 2 / baseline.time, between,
        alone.error / counted,
    )  # fmt: skip
    half = max(t * float(np.sqrt(sum(e**2 for e in errors))), (high - low) / 2)
    return Speedup(
        value,
        (value * float(np.exp(-half)), value * float(np.exp(half))),
        again.time / baseline.time,
        counted,
    )


def floor_s(size: int, work: int, dtype: str, gpu: str | None) -> float:
    """Lower bound of a correct call on this GPU in seconds; 0 if unknown."""
    return 1e-6 * (roofline.floor_us(size, work, dtype, roofline.peaks(gpu)) or 0.0)
