"""Feedback from rows, without a judge."""

from __future__ import annotations

from typing import Any

import pytest
from bench.agents.conftest import row
from fk_bench.agents import feedback
from fk_bench.agents.budget import Spent, TaskBudget
from fk_bench.agents.session import Attempt, Task
from fk_bench.core.rows import Status


def test_first_failure_has_expected_and_actual_value() -> None:
    wrong = "output 0: 4 values differ; at [1, 2] expected 0.25, got 0.5 (T=3; float32)\nthe same values: fk"
    found = feedback.of_rows(
        "rms_norm", [row("a"), row("b", Status.WRONG, wrong), row("c", Status.CRASH, "ended")]
    )
    assert (found["verdict"], found["failed"]) == ("wrong", 2)
    failure = found["first_failure"]
    assert failure["case"]["name"] == "b"
    assert (failure["index"], failure["expected"], failure["got"]) == ("[1, 2]", "0.25", "0.5")
    assert "\n" not in failure["reason"]


def test_times_are_against_baseline_and_floor() -> None:
    times = {
        "time_us_p50": 2.0,
        "baseline_us_p50": 3.0,
        "floor_us": 1.0,
        "speedup": 1.5,
        "roofline_pct": 50.0,
    }
    found = feedback.of_rows("rms_norm", [row("a", **times)])
    want = {
        "case": "a",
        "baseline": "cublas",
        "time_us": 2.0,
        "baseline_us": 3.0,
        "floor_us": 1.0,
        "speedup": 1.5,
    }
    assert want.items() <= found["times"][0].items()
    assert found["verdict"] == "ok" and found["speedup"] == 1.5


def test_nothing_checked_is_no_success() -> None:
    assert feedback.verdict([row("a", Status.SKIPPED)]) is Status.SKIPPED
    assert feedback.verdict([]) is Status.SKIPPED


def test_controls_are_removed_from_text() -> None:
    found = feedback.of_rows("rms_norm", [row("a", Status.CRASH, "\x1b[31mred\x07")])
    assert found["first_failure"]["reason"] == "red"


def attempt(number: int, status: Status, speedup: float | None) -> Attempt:
    found: dict[str, Any] = {} if speedup is None else {"speedup": speedup}
    return Attempt(number, str(number), Any, None, status, found, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([(Status.OK, 0.5), (Status.WRONG, 9.0), (Status.OK, 1.5), (Status.OK, 1.2)], 2),
        ([(Status.OK, 0.5), (Status.CRASH, None)], 0),
        ([(Status.OK, None), (Status.OK, None)], 1),  # nothing was timed: the latest
        ([(Status.OK, 1.0), (Status.OK, 1.0)], 0),  # the first of two equal ones
        ([(Status.WRONG, None)], None),
    ],
)
def test_best_attempt_is_the_fastest_right_one(found: Any, best: int | None) -> None:
    task = Task("rms_norm", 1, Any, Spent(TaskBudget()))  # type: ignore[arg-type]
    task.attempts = [attempt(n, *one) for n, one in enumerate(found)]
    assert (None if task.best is None else task.best.number) == best
