"""Several starts of the judge combined: the interval also covers the next start."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.statistics.restarts import merged, variance_between

WITHIN, BETWEEN = 0.01, 0.05


def row(
    case: str, speedup: float, status: Status = Status.OK, within: float = WITHIN, **metrics: float
) -> Row:
    found = Row(
        run_id="r", command="kernels", status=status, reason="" if status is Status.OK else "bad",
        subject={"op": "relu2"}, case={"kind": "case", "name": case, "source": "random"}, baseline="vllm",
        metrics={"speedup": speedup, **metrics}, round=0,
    )  # fmt: skip
    found.ci95["speedup"] = (speedup * math.exp(-1.96 * within), speedup * math.exp(1.96 * within))
    return found


def starts(rng: np.random.Generator, number: int, cases: int = 60) -> list[list[Row]]:
    spread = math.hypot(WITHIN, BETWEEN)
    return [[row(str(c), math.exp(rng.normal(0.1, spread))) for c in range(cases)] for _ in range(number)]


def agreeing(a: list[Row], b: list[Row]) -> float:
    pairs = [(x.ci95["speedup"], y.ci95["speedup"]) for x, y in zip(a, b, strict=True)]
    return float(np.mean([x[0] <= y[1] and y[0] <= x[1] for x, y in pairs]))


def test_results_of_two_starts_agree_more_often() -> None:
    rng = np.random.default_rng(0)
    one, two = starts(rng, 2), starts(rng, 2)
    assert agreeing(one[0], two[0]) < 0.6
    first, second = merged(one), merged(two)
    assert agreeing(first, second) >= 0.95
    assert first[0].metrics["between_starts"] == pytest.approx(BETWEEN, rel=0.3) and first[0].round is None
    widths = [math.log(r.ci95["speedup"][1] / r.ci95["speedup"][0]) / (2 * 1.96) for r in first]
    assert np.mean(widths) == pytest.approx(math.hypot(WITHIN, BETWEEN) / 2**0.5, rel=0.3)


def test_equal_starts_add_no_variance() -> None:
    assert variance_between([[(0.1, 1e-4), (0.11, 1e-4)]] * 9) == 0.0
    assert variance_between([[(0.1, 1e-4)], []]) == 0.0
    assert variance_between([[(0.0, 0.0), (0.1, 0.0)]]) == pytest.approx(0.005, rel=1e-3)


def test_case_must_pass_every_start() -> None:
    bad = row("a", 3.0, Status.WRONG)
    (found,) = merged([[row("a", 1.0)], [bad], [row("a", 1.0)]])
    assert (found.status, found.reason, found.round) == (Status.WRONG, "bad", None)
    bad.reason = "changed later"
    assert found.reason == "bad"


def test_times_are_means_of_timed_starts() -> None:
    unsteady = row("a", 9.0)
    unsteady.ci95.clear()
    (found,) = merged([[row("a", 1.0, time_us_p50=2.0)], [unsteady], [row("a", 1.21, time_us_p50=4.0)]])
    assert found.metrics["speedup"] == pytest.approx(1.1) and found.metrics["time_us_p50"] == 3.0
    assert found.metrics["starts"] == 2 and found.case["significant"] is False


@pytest.mark.slow
def test_judge_repeats_starts() -> None:
    rows = judge_ops(
        ["relu2"], None, Options(device="cpu", cases=("random",), names=("odd_63",), rounds=3, starts=2)
    )
    cases = [r for r in rows if r.kind == "case"]
    assert [r.round for r in cases] == [None] and {r.run_id for r in rows} == {cases[0].run_id}
    assert [r.kind for r in rows] == ["case", "op", "run"] and rows[-1].metrics["cases"] == 1
