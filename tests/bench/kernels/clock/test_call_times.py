"""From batches to times: slopes, intervals, charges, and times that must not be used."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.clock import call_times
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.checks import Checked
from fk_bench.kernels.judge.correctness.errors import Errors
from fk_bench.kernels.judge.rows import metrics
from fk_bench.kernels.judge.rows.verdict import CaseVerdict, Evidence, decide


def samples(
    call_s: float, spread: float, seed: int, start_s: float = 1e-4, n: int = 50, rounds: int = 15
) -> Samples:
    made, rng = Samples(n), np.random.default_rng(seed)
    for _ in range(rounds):
        for double in (False, True):
            count = n * (1 + double)
            made.add(double, start_s + count * call_s * (1 + spread * rng.standard_normal()), None)
    return made


def jittery(call_s: float, calls: tuple[float, ...], n: int = 50) -> Samples:
    """Rounds whose slopes are these multiples of call_s."""
    made = Samples(n)
    for factor in calls:
        made.add(False, 1e-4 + n * call_s, None)
        made.add(True, 1e-4 + n * call_s * (1 + factor), None)
    return made


def test_slope_excludes_start_of_batch() -> None:
    for start in (0.0, 1e-4, 1.0):
        assert samples(2e-6, 0.0, 0, start).time == pytest.approx(2e-6, rel=1e-6)
        assert samples(2e-6, 0.0, 0, start).intercept == pytest.approx(start, abs=1e-12)


def test_slope_uses_the_secret_lengths() -> None:
    made = Samples(50)
    for short, long in ((40, 90), (33, 100), (50, 100), (47, 81)):
        made.add(True, 1e-4 + long * 2e-6, None, long)
        made.add(False, 1e-4 + short * 2e-6, None, short)
    assert list(made.slopes) == pytest.approx([2e-6] * 4) and made.intercept == pytest.approx(1e-4)


# The interval


def test_interval_covers_the_truth() -> None:
    held = 0
    for seed in range(60):
        found = call_times.speedup(
            samples(1e-5, 0.01, seed), samples(2e-5, 0.01, 1000 + seed), samples(2e-5, 0.01, 2000 + seed)
        )
        assert found.interval[0] <= found.value <= found.interval[1]
        held += found.interval[0] <= 2.0 <= found.interval[1]
    assert held >= 54


def test_identity_is_rarely_significant() -> None:
    """Also while the speed of the machine drifts from round to round, for all sets of batches alike."""
    significant = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        drift = 1 + 0.05 * rng.standard_normal(15)
        sets = [Samples(50) for _ in range(3)]
        for made in sets:
            for factor in drift * (1 + 0.01 * rng.standard_normal(15)):
                made.add(False, 1e-4 + 50e-5, None)
                made.add(True, 1e-4 + 50e-5 * (1 + factor), None)
        significant += call_times.speedup(*sets).significant
    assert significant <= 8


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_interval_has_difference_between_baselines(ratio: float) -> None:
    candidate, baseline = samples(1e-5, 0.001, 1), samples(1e-5, 0.001, 2)
    quiet = call_times.speedup(candidate, baseline, samples(1e-5, 0.001, 3))
    busy = call_times.speedup(candidate, baseline, samples(1e-5 * ratio, 0.001, 3))
    assert quiet.again == pytest.approx(1, abs=0.01) and busy.again == pytest.approx(ratio, rel=0.01)
    assert math.log(quiet.interval[1] / quiet.interval[0]) < 0.02
    assert math.log(busy.interval[1] / busy.interval[0]) > 2 * abs(math.log(ratio))
    assert not busy.significant


def test_charge_counts_in_the_speedup() -> None:
    candidate, baseline, again = (samples(1e-5, 0.001, seed) for seed in (1, 2, 3))
    assert call_times.speedup(candidate, baseline, again, 1e-5).value == pytest.approx(0.5, rel=0.01)


# Calls alone on a CPU


def calls(call_s: float, spread_s: float, seed: int, empty_s: float = 2e-6, count: int = 80) -> Samples:
    made, rng = Samples(1), np.random.default_rng(seed)
    for _ in range(count):
        made.add_call(empty_s + call_s + spread_s * rng.standard_normal(), empty_s)
    return made


def test_request_without_a_call_is_subtracted() -> None:
    made = calls(1e-5, 1e-6, 1, empty_s=3e-6)
    assert made.time == pytest.approx(1e-5, rel=0.05) and made.intercept == pytest.approx(3e-6, rel=0.01)
    found = call_times.speedup(made, calls(2e-5, 1e-6, 2), calls(2e-5, 1e-6, 3))
    assert found.interval[0] < 2 < found.interval[1] and found.value == pytest.approx(2, rel=0.05)


def test_calls_alone_have_no_charge_and_no_batches() -> None:
    mine, theirs = calls(1e-5, 1e-6, 1, empty_s=5e-5), calls(2e-5, 1e-6, 2)
    assert call_times.charge(mine, theirs) == 0.0
    assert call_times.invalid(mine, theirs, 0.0) == "" and call_times.counted_alone(mine, theirs) is None


@pytest.mark.parametrize(("call_s", "short"), [(1e-6, True), (-1e-6, True), (3e-5, False)])
def test_call_within_the_noise_is_too_short(call_s: float, short: bool) -> None:
    """Also next to a slow baseline; it is neither invalid nor a huge speedup."""
    said = call_times.unresolved(calls(call_s, 8e-6, 1), calls(3e-5, 8e-6, 2))
    assert said.startswith("calls are too short for the clock") is short


def test_negative_quantile_of_batches_is_invalid() -> None:
    """A side that waits in some of its short batches; on a busy machine the baseline's are negative, too."""
    waits = jittery(1e-5, (0.4, 0.4, -0.5, 0.4, 0.4, -0.5, 0.4, 0.4, -0.5, 0.4))
    good, busy = samples(1e-5, 0.001, 1), jittery(1e-5, (1, 1, -1, 1, 1, -1, 1, 1, -1, 1))
    assert waits.time > 0 and "not positive" in call_times.invalid(waits, good, 0.0)
    assert "not positive" not in call_times.invalid(waits, busy, 0.0)


# Scatter


def test_scattered_baseline_is_unsteady() -> None:
    good, wild = samples(1e-5, 0.001, 1), jittery(1e-5, (0.1, 5.0, -3.0, 9.0))
    assert call_times.unsteady(good, good) == ""
    for pair in ((wild, good), (good, wild)):
        assert "the baseline's times scatter" in call_times.unsteady(*pair)


def test_scattered_candidate_counts_at_80th_percentile() -> None:
    good = samples(1e-5, 0.001, 1)
    wild = jittery(1e-5, (0.1, 0.2, 0.5, 3.0, 4.0, 2.0, 0.3, 4.0, 0.1, 0.4))
    assert not wild.steady and np.median(wild.slopes) < 0.5e-5
    assert call_times.invalid(wild, good, 0.0) == ""
    found = call_times.speedup(wild, good, good)
    assert found.time == pytest.approx(float(np.percentile(wild.slopes, 80))) and found.value < 0.35
    assert found.value == pytest.approx(1e-5 / found.time, rel=0.01)
    assert found.interval[0] < found.value < found.interval[1]


def test_candidate_that_scatters_below_zero_is_invalid() -> None:
    wild = jittery(1e-5, (-4.0, 0.5, -3.0, 5.0, -2.0))
    assert "scatter" in call_times.invalid(wild, samples(1e-5, 0.001, 1), 0.0)


def test_calls_that_the_clock_does_not_resolve_are_untimed() -> None:
    noisy = jittery(1e-6, (-3.0, 0.5, 2.0, 5.0, -2.0, 7.0, 0.6))
    near = jittery(1e-6, (1.5, 3.0, 2.0, 4.0, 2.5, 6.0, 4.0))
    assert near.steady and "too short for the clock" in call_times.unresolved(noisy, near)
    long = [jittery(3e-3, tuple(x / 1 for x in (1.5, 3.0, 2.0, 4.0, 2.5, 6.0, 4.0))) for _ in range(2)]
    assert call_times.unresolved(*long).startswith("the times scatter too much: the baseline's")
    precise = samples(1e-6, 0.001, 1)
    assert call_times.unresolved(noisy, precise) == ""  # the candidate's own scatter
    assert call_times.unresolved(precise, near) == call_times.unresolved(precise, precise) == ""


def scattered(side: Samples, by: float) -> Samples:
    """The same median with a scatter of its slopes; still steady."""
    made, signs = Samples(side.n), (0, 1, -1)
    for i, (single, double) in enumerate(zip(side.single, side.double, strict=True)):
        made.add(False, single, None)
        made.add(True, double + by * side.n * signs[i % 3] * side.time, None)
    return made


def test_candidate_scatter_widens_no_allowance() -> None:
    base = samples(1e-5, 0.0005, 2)
    steady = samples(1e-5, 0.0005, 1)
    wide = scattered(steady, 0.3)
    assert wide.steady and wide.spread > 10 * steady.spread
    for side in (steady, wide):
        side.events_single = [1e-4 + 0.8 * (s - 1e-4) for s in side.single]
        side.events_double = [1e-4 + 0.8 * (s - 1e-4) for s in side.double]
        assert "own events" in call_times.invalid(side, base, 0.0)
        side.events_single, side.events_double = [], []
        assert "CUPTI saw kernels" in call_times.invalid(side, base, 0.0, busy_s=1.3e-5)
        slow_start = Samples(side.n, [s + 2e-4 for s in side.single], [s + 2e-4 for s in side.double])
        assert call_times.charge(slow_start, base) == pytest.approx(4e-6, rel=0.15)
    # The baseline's scatter is the machine's, and does widen them
    wide.events_single = [1e-4 + 0.8 * (s - 1e-4) for s in wide.single]
    wide.events_double = [1e-4 + 0.8 * (s - 1e-4) for s in wide.double]
    assert call_times.invalid(wide, scattered(base, 0.5), 0.0) == ""


# Times that must not be used


def test_impossible_times_are_invalid() -> None:
    good = samples(1e-5, 0.001, 1)
    assert call_times.invalid(good, samples(2e-5, 0.001, 2), 0.0) == ""
    assert "none of the work" in call_times.invalid(samples(-1e-7, 0.0, 3), good, 0.0)
    assert call_times.invalid(good, good, 1e-3) != ""
    apart = samples(1e-5, 0.001, 5)
    apart.events_single = [2 * s for s in apart.single]
    apart.events_double = [2 * s for s in apart.double]
    assert "events" in call_times.invalid(apart, good, 0.0)


@pytest.mark.parametrize(("launches", "valid"), [(0.0, False), (0.97, False), (1.0, True), (3.0, True)])
def test_call_without_a_kernel_is_invalid(launches: float, valid: bool) -> None:
    good = samples(1e-5, 0.001, 1)
    said = call_times.invalid(good, good, 0.0, launches=launches)
    assert (said == "") is valid and ("launch none" in said) is not valid


def lone(side: Samples, seconds: float, spread: float = 0.0, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    side.alone = [seconds * (1 + spread * rng.standard_normal()) for _ in range(10)]
    return side


@pytest.mark.parametrize(
    ("call_s", "own", "other", "caught"),
    [
        (1e-6, 130e-6, 110e-6, True),  # one call costs what twenty do in a batch
        (1e-6, 102e-6, 110e-6, False),
        (1e-6, 105e-6, 110e-6, False),  # less than 5 us
        (1e-6, 108e-6, 110e-6, True),
        (2e-5, 125e-6, 110e-6, False),  # less than the call's own time
        (2e-5, 155e-6, 110e-6, True),
    ],
)  # fmt: skip
def test_call_alone_costs_what_the_slope_explains(
    call_s: float, own: float, other: float, caught: bool
) -> None:
    candidate = lone(samples(call_s, 0.001, 1), own, 0.002, 1)
    baseline = lone(samples(1e-5, 0.001, 2), other, 0.002, 2)
    assert ("batched" in call_times.batched(candidate, baseline)) is caught
    assert call_times.batched(candidate, baseline) == call_times.invalid(candidate, baseline, 0.0)


@pytest.mark.parametrize(
    ("own", "produced", "expected"),
    [
        (11.2e-6, True, "slope"), (11.9e-6, True, "slope"), (12.2e-6, True, "alone"), (12.8e-6, True, "batched"),
        (12.2e-6, False, "slope"), (12.8e-6, False, "batched"),
    ],
)  # fmt: skip
def test_queued_call_costs_what_the_slope_explains(own: float, produced: bool, expected: str) -> None:
    """Finer than a request, in which the process starts the call. By the slopes it costs 9 us less here."""
    candidate, baseline = samples(1e-6, 0.0005, 1), samples(1e-5, 0.0005, 2)
    candidate.passed, baseline.passed, candidate.produced = [own] * 10, [20e-6] * 10, produced
    assert counted(candidate, baseline) == expected


def counted(candidate: Samples, baseline: Samples) -> str:
    if call_times.batched(candidate, baseline):
        return "batched"
    return "slope" if call_times.counted_alone(candidate, baseline) is None else "alone"


# Rows of an H100, 2026-11-26: microseconds of a call in a batch, and of the same call alone behind a producer.
HONEST = ((3.55, 4.14), (1.3, 1.67), (3.36, 3.68), (2.0, 2.25))  # the four that exceed most of 51
ATTACKS = ((1.0, 3.2), (1.0, 3.3))  # gpu_one_launch and gpu_forged_trace


def queued(call_us: float, alone_us: float, seed: int, scatter_us: float, n: int = 96) -> Samples:
    """Slopes of this time, and queued calls that take a switch of 12 us more, with a tail as a busy host has."""
    made, rng = samples(1e-6 * call_us, 0.0005, seed), np.random.default_rng(seed)
    tail = np.where(rng.random(n) < 0.1, rng.exponential(20, n), 0)
    made.passed = list(1e-6 * (12 + alone_us + scatter_us * rng.standard_normal(n) + tail))
    made.produced = True
    return made


@pytest.mark.parametrize("scatter_us", [0.2, 1.0])
@pytest.mark.parametrize(("recorded", "least", "most"), [(HONEST, 0, 1), (ATTACKS, 195, 200)])
def test_recorded_calls_alone(
    recorded: tuple[tuple[float, float], ...], least: int, most: int, scatter_us: float
) -> None:
    """Of 200 runs of each; the baseline's calls cost alone what they cost in a batch."""
    for batch_us, alone_us in recorded:
        caught = 0
        for seed in range(200):
            candidate = queued(batch_us, alone_us, seed, scatter_us, 288)
            sides = candidate, queued(1.2, 1.2, 1000 + seed, scatter_us, 288)
            honest = recorded is HONEST
            caught += call_times.batched(*sides) != "" or (
                honest and call_times.counted_alone(*sides) is not None
            )
        assert least <= caught <= most


# Microseconds in a batch and alone, of candidate and baseline; the true ratio of calls alone
COUNTED = (
    ((895, 1169), (1000, 1000), 1000 / 1169),  # decode attention of 64 x 10,240 keys on an H100, 2026-11-27
    ((895, 1169), (1300, 1300), 1300 / 1169),
    ((895, 1400), (1300, 1500), 1500 / 1400),  # the baseline's calls overlap, too
    ((895, 1400), (1000, 1150), 1150 / 1400),
    ((60, 102), (100, 100), 100 / 102),  # a part of the work of another call
    ((2.0, 3.5), (3.6, 3.6), 3.6 / 3.5),
    ((2.0, 3.2), (1.2, 1.2), 1.2 / 3.2),  # slower than the baseline: more time alone must not help
)


@pytest.mark.parametrize(("candidate", "baseline", "true"), COUNTED)
def test_call_longer_alone_is_counted_alone(
    candidate: tuple[float, float], baseline: tuple[float, float], true: float
) -> None:
    mine, base, again = queued(*candidate, 1, 0.1), queued(*baseline, 2, 0.1), queued(*baseline, 3, 0.1)
    assert call_times.batched(mine, base) == call_times.invalid(mine, base, 0.0) == ""
    alone = call_times.counted_alone(mine, base)
    assert alone is not None and call_times.counted_alone(base, base) is None
    longer = (candidate[1] - candidate[0]) - (baseline[1] - baseline[0])
    assert alone.extra == pytest.approx(1e-6 * longer, rel=0.1) and (alone.both > 0) is (true > 1)
    found = call_times.speedup(mine, base, again, alone=alone)
    slopes = call_times.speedup(mine, base, again)
    assert found.value < min(slopes.value, 1.02 * true)  # never more than the truth
    least = (
        true if candidate[0] > 100 and baseline[0] == baseline[1] else 0.9 * true
    )  # the gate counts if it is large
    assert found.value > 0.97 * least and found.interval[0] < found.value < found.interval[1]
    charged = call_times.speedup(mine, base, again, 1e-3, alone=alone)
    assert charged.time == pytest.approx(mine.time + 1e-3 + alone.both)


@pytest.mark.parametrize(
    ("batch_us", "alone_us", "produced", "expected"),
    [
        (100, 125, True, "slope"),  # 30% are allowed
        (2.0, 2.9, True, "slope"),  # and 1 us
        (100, 140, True, "alone"),
        (100, 190, True, "alone"),
        (100, 215, True, "batched"),  # no overlap at the ends explains a factor of two
        (100, 190, False, "slope"),
        (100, 215, False, "batched"),
    ],
)
def test_only_up_to_twice_the_slope_is_counted_alone(
    batch_us: float, alone_us: float, produced: bool, expected: str
) -> None:
    mine, base = queued(batch_us, alone_us, 1, 0.1), queued(100, 100, 2, 0.1)
    mine.produced = base.produced = produced
    assert counted(mine, base) == expected


@pytest.mark.parametrize(
    ("candidate", "baseline", "busy_us", "valid"),
    [
        ((895, 1169), (1000, 1000), 1169, True),  # honest: under CUPTI calls do not overlap
        ((895, 1400), (1300, 1500), 1400, True),  # so do the baseline's
        ((4.1, 5.8), (6.0, 6.0), 5.9, True),
        ((895, 1169), (1000, 1000), 1300, False),  # more than is counted: work outside of both clocks
        ((2.0, 3.2), (1.2, 1.2), 4.6, False),
        (
            (4.1, 5.8),
            (6.0, 6.0),
            10.5,
            False,
        ),  # the gate is in the time that is counted; twice the slope ends it
        (
            (895, 930),
            (1000, 1000),
            1169,
            False,
        ),  # side by side in a batch and alone no slower: the slope is counted
    ],
)
def test_trace_shows_no_more_than_is_counted(
    candidate: tuple[float, float], baseline: tuple[float, float], busy_us: float, valid: bool
) -> None:
    mine, base = queued(*candidate, 1, 0.1), queued(*baseline, 2, 0.1)
    alone, said = call_times.counted_alone(mine, base), call_times.invalid(mine, base, 0.0, 1e-6 * busy_us)
    assert (said == "") is valid and said.startswith("" if valid else "CUPTI saw kernels")
    assert ("of calls alone" in said) is (alone is not None and not valid)
    found = call_times.speedup(mine, base, base, alone=alone)
    if valid:  # the score has at least the time that the trace shows
        assert alone is not None and found.time > 1e-6 * busy_us / 1.05 - call_times.TRACED_S
    mine.produced = False  # nothing is counted alone, so the slope must explain the trace
    assert "the judge's clock " in call_times.invalid(mine, base, 0.0, 1e-6 * busy_us)


@pytest.mark.parametrize(
    ("candidate", "baseline", "early"),
    [
        ((2.6, -147), (7.9, 7.9), True),  # an H100, 2026-11-27: a report in front of the call
        ((2.6, -7), (7.9, 7.9), False),
        ((2.9, 2.9), (5.0, 9.7), False),  # the widest of 344 honest calls, relative
        ((1184, 1184), (1196, 1246), False),  # and in microseconds
        ((400, 400), (1000, 1400), False),  # the baseline's calls overlap
        ((400, 250), (1000, 1400), True),
    ],
)
@pytest.mark.parametrize("n", [6, 96])
def test_report_before_the_end_is_invalid(
    candidate: tuple[float, float], baseline: tuple[float, float], early: bool, n: int
) -> None:
    mine, base = queued(*candidate, 1, 0.2, n), queued(*baseline, 2, 0.2, n)
    assert bool(call_times.reported_early(mine, base)) is early
    assert ("reports its end" in call_times.invalid(mine, base, 0.0)) is early


def test_row_counted_alone_has_both_times() -> None:
    row: Any = SimpleNamespace(metrics={}, case={}, ci95={})
    timed = Timed(queued(895, 1169, 1, 0.1), queued(1000, 1000, 2, 0.1), queued(1000, 1000, 3, 0.1))
    verdict = decide(Evidence(checked=Checked(Errors(), 0.1, {}), wants_times=True, timed=timed))
    assert verdict.status is Status.OK and verdict.speedup
    assert verdict.reason.startswith("counted: alone, 11") and "895." in verdict.reason
    metrics._times(row, timed, verdict, 1, 1, 0.0)
    assert row.case["counted"] == "alone" and row.metrics["batch_us"] == pytest.approx(895, rel=0.01)
    assert row.metrics["time_us_p50"] == pytest.approx(1169, rel=0.01)
    assert row.metrics["speedup"] == pytest.approx(1000 / 1169, rel=0.02)
    assert row.metrics["baseline_us_p50"] == pytest.approx(row.metrics["baseline_batch_us"], rel=0.01)


@pytest.mark.parametrize("kind", ["alone", "passed"])
def test_two_modes_of_calls_alone_are_not_batched(kind: str) -> None:
    """A median may lie in either mode; then all honest runs of one seed differ by 10 us."""
    refused = apart = 0
    for seed in range(200):
        sides = []
        for s in (seed, 1000 + seed):
            rng, side = np.random.default_rng(s), samples(1.4e-6, 0.0005, s)
            slow = np.where(rng.random(96) < 0.5, 10.0, 0.0)
            setattr(side, kind, list(1e-6 * (30 + slow + 0.2 * rng.standard_normal(96))))
            sides.append(side)
        refused += call_times.batched(*sides) != ""
        apart += float(np.median(getattr(sides[0], kind)) - np.median(getattr(sides[1], kind))) > 8e-6
    assert refused <= 1 and apart > 20


def test_scatter_of_calls_alone_hides_no_batch() -> None:
    """Calls that are slowed at random exceed at least as much as without; the verdict needs no second run."""
    for seed in range(50):
        candidate, rng = queued(0.9, 6.0, seed, 0.2), np.random.default_rng(seed)
        candidate.passed = [
            p + 1e-6 * float(d) for p, d in zip(candidate.passed, rng.exponential(30, 96), strict=True)
        ]
        assert call_times.batched(candidate, queued(1.2, 1.2, 1000 + seed, 0.2))


def test_row_has_quantiles_of_calls_alone() -> None:
    candidate, baseline = lone(samples(1e-6, 0.001, 1), 5e-6), samples(1e-6, 0.001, 2)
    baseline.passed = [1e-6 * i for i in range(11)]
    row: Any = SimpleNamespace(metrics={}, case={}, ci95={})
    metrics._times(row, Timed(candidate, baseline, baseline), CaseVerdict(Status.INVALID), 1, 1, 0.0)
    assert row.case["alone"] == {
        "candidate": {"alone": [5.0] * 5}, "baseline": {"passed": [1.0, 2.5, 5.0, 7.5, 9.0]},
    }  # fmt: skip


def test_requests_have_one_cost_for_both_sides() -> None:
    for requests in (0.0, 1e-3):
        sides = [lone(samples(c, 0.001, 1), requests + c) for c in (1e-6, 5e-5)]
        assert call_times.batched(*sides) == "" and call_times.batched(*reversed(sides)) == ""
    few = lone(samples(1e-6, 0.001, 1), 1.0)
    few.alone = few.alone[:2]
    assert call_times.batched(few, lone(samples(1e-6, 0.001, 1), 0.0)) == ""  # no median of two


# Charges


def test_overhead_of_batches_is_charged() -> None:
    base = samples(1e-5, 0.001, 2, start_s=3e-4)
    assert call_times.charge(samples(1e-5, 0.001, 1, start_s=3e-4), base) == 0
    for slower_half, faster_whole in ((2e-4, 0.0), (0.0, 2e-4)):
        cheat = samples(1e-5, 0.001, 3, start_s=3e-4)
        cheat.single = [s + slower_half for s in cheat.single]
        cheat.double = [s - faster_whole for s in cheat.double]
        assert cheat.time < 0.7e-5
        charged = call_times.charge(cheat, base)
        assert cheat.time + charged > 0.99e-5
        assert call_times.speedup(cheat, base, base).interval[0] > 1.01
        assert call_times.speedup(cheat, base, base, charged).interval[0] < 1.01
    late = samples(1e-5, 0.001, 4, start_s=2e-3)  # an honest candidate is charged no more than its overhead
    assert late.time + call_times.charge(late, base) == pytest.approx((1e-5 * 50 + 1.7e-3) / 50, rel=0.01)


def test_one_call_shows_the_overhead_of_a_batch() -> None:
    """A baseline whose first calls are slower has a small intercept; its request for one call shows the rest."""
    base, candidate = samples(1e-5, 0.0, 2, start_s=1e-5), samples(1e-5, 0.0, 1, start_s=3e-4)
    assert call_times.charge(candidate, base) == pytest.approx(2.9e-4 / 50, rel=0.01)
    lone(base, 3e-4 + 1e-5)
    assert base.intercept == pytest.approx(1e-5) and base.overhead == pytest.approx(3e-4)
    assert call_times.charge(candidate, base) == 0
    base.given = [
        4e-5
    ] * 3  # batches contain the copy of their inputs; requests for one call are counted without it
    assert base.overhead == pytest.approx(3.4e-4)


def test_slow_copy_of_inputs_is_charged() -> None:
    """Work that a stopped process left on the GPU delays the judge's copy."""
    base, candidate = samples(1e-5, 0.001, 2), samples(1e-5, 0.001, 1)
    base.given, candidate.given = [1e-4] * 30, [1.04e-4] * 30
    assert call_times.charge(candidate, base) == 0  # within 2% and 5 us
    candidate.given = [3e-4] * 30
    assert call_times.charge(candidate, base) == pytest.approx(2e-4 / 50)
    candidate.given = [0.5e-4] * 30
    assert call_times.charge(candidate, base) == 0
