"""The status of a case: each outcome of `decide`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fk_bench.core.rows import Row, Status, Subject, Untimed
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.checks import Checked, Chosen
from fk_bench.kernels.judge.correctness.errors import Errors
from fk_bench.kernels.judge.processes.messages import Traced
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.rows import metrics
from fk_bench.kernels.judge.rows.verdict import CaseVerdict, Evidence, decide

from fastkernels.core import registry

CHECKED = Checked(Errors(rms=1e-3), 0.1, {})


def samples(call_s: float, scatter: float = 0.0, rounds: int = 10, seed: int = 0) -> Samples:
    made, rng = Samples(50), np.random.default_rng(seed)
    for _ in range(rounds):
        made.add(False, 1e-4 + 50 * call_s, None)
        made.add(True, 1e-4 + 50 * call_s * (2 + scatter * rng.standard_normal()), None)
    return made


def timed(candidate: Samples | None = None, baseline: Samples | None = None, **traced: Any) -> Timed:
    base = baseline or samples(2e-5)
    return Timed(candidate or samples(1e-5), base, samples(2e-5), Traced(**traced))


def seen(**changes: Any) -> Evidence:
    return Evidence(**{"checked": CHECKED, "wants_times": True, "timed": timed(), **changes})


def test_checked_and_timed_case_is_ok() -> None:
    assert decide(seen()) == CaseVerdict(Status.OK, "", True)


def test_no_evidence_is_not_ok() -> None:
    assert decide(Evidence()).status is Status.FAILED
    assert decide(seen(checked=None)).status is Status.FAILED


@pytest.mark.parametrize("status", [Status.UNSUPPORTED, Status.SIGNATURE_MISMATCH])
def test_refused_case_keeps_its_status(status: Status) -> None:
    assert decide(Evidence(refused=(status, "why"))) == CaseVerdict(status, "why")


FAILURES = (
    Status.COMPILE_ERROR, Status.RUNTIME_ERROR, Status.SIGNATURE_MISMATCH, Status.OOM, Status.TIMEOUT, Status.CRASH,
    Status.INVALID,
    Status.UNSUPPORTED,
)  # fmt: skip


@pytest.mark.parametrize("status", FAILURES)
def test_failure_outweighs_all_other_evidence(status: Status) -> None:
    """A process that fails after it was timed has lost; a failure of the baseline is not the candidate's."""
    verdict = decide(seen(failure=RunnerError(status, "why", True, "candidate")))
    assert verdict == CaseVerdict(status, "why")
    verdict = decide(seen(failure=RunnerError(status, "why", True, "baseline")))
    if status is Status.UNSUPPORTED:
        assert verdict.status is status
    else:
        assert verdict.status is Status.FAILED and "the baseline" in verdict.reason


def test_wrong_output_outweighs_times() -> None:
    assert decide(seen(wrong="output 0 is off")) == CaseVerdict(Status.WRONG, "output 0 is off")


def test_failure_of_the_judge_is_failed() -> None:
    verdict = decide(seen(broken="no memory for the oracle"))
    assert verdict.status is Status.FAILED and "the judge" in verdict.reason


def test_extreme_case_needs_no_times() -> None:
    assert decide(seen(wants_times=False, timed=None)) == CaseVerdict(Status.OK, untimed=Untimed.NOT_WANTED)


def test_case_without_baseline_is_not_timed() -> None:
    verdict = decide(seen(timed=None, passed_over={"fa3": "needs a GPU"}))
    assert verdict.status is Status.OK and not verdict.speedup and "fa3: needs a GPU" in verdict.reason


def test_unsteady_baseline_gives_no_speedup() -> None:
    verdict = decide(seen(timed=timed(baseline=samples(2e-5, 3.0))))
    assert verdict.status is Status.OK and not verdict.speedup and "the baseline's times" in verdict.reason


def test_unsteady_candidate_keeps_its_speedup() -> None:
    jitters = Samples(50)
    for factor in (0.1, 0.2, 0.5, 3.0, 4.0, 2.0, 0.3, 4.0, 0.1, 0.4):
        jitters.add(False, 1e-3, None)
        jitters.add(True, 1e-3 + 50 * 1e-5 * factor, None)
    verdict = decide(seen(timed=timed(jitters)))
    assert verdict.status is Status.OK and verdict.speedup and "80th percentile" in verdict.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"timed": timed(samples(0.0))}, "none of the work"),
        ({"floor_s": 1e-3}, ""),
        ({"timed": timed(launches=0.5)}, "launch none"),
        ({"timed": timed(call_s=5e-5)}, "CUPTI saw kernels"),
    ],
)
def test_time_that_must_not_be_used_is_invalid(changes: dict[str, Any], said: str) -> None:
    verdict = decide(seen(**changes))
    assert verdict.status is Status.INVALID and said in verdict.reason and not verdict.speedup


# Numbers of a row


def filled(evidence: Evidence) -> Row:
    spec = registry.get("rms_norm")
    row = Row(run_id="r", command="kernels", subject=Subject(op=spec.name))
    metrics.fill(row, evidence, decide(evidence), spec, spec.cases[0], 0.5)
    return row


def test_row_of_a_timed_case_has_its_interval() -> None:
    row = filled(seen(chosen=Chosen("vllm", Errors(rms=2e-3), 2e-5)))
    assert row.metrics["speedup"] == pytest.approx(2.0) and row.baseline == "vllm"
    assert row.metrics["again"] == pytest.approx(1.0) and row.metrics["noise"] == pytest.approx(0, abs=1e-9)
    assert row.metrics["rounds"] == 10 and row.metrics["calls"] == 50
    assert row.ci95["speedup"][0] <= row.metrics["speedup"] <= row.ci95["speedup"][1]


def test_noise_is_the_deviation_of_again() -> None:
    times = timed()
    times.again = samples(1.8e-5)
    row = filled(seen(timed=times))
    assert row.metrics["again"] == pytest.approx(0.9) and row.metrics["noise"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"wrong": "off"},
        {"failure": RunnerError(Status.CRASH, "gone", True, "candidate")},
        {"timed": timed(launches=0.5)},
        {"timed": timed(baseline=samples(2e-5, 3.0))},
    ],
)
def test_row_without_a_usable_time_has_no_speedup(changes: dict[str, Any]) -> None:
    row = filled(seen(**changes))
    assert "speedup" not in row.metrics and "speedup" not in row.ci95 and "significant" not in row.case
