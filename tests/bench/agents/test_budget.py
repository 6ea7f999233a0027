"""Durations and limits of a task."""

from __future__ import annotations

import pytest
from fk_bench.agents.budget import Spent, TaskBudget, seconds_of


@pytest.mark.parametrize(("text", "want"), [("90s", 90), ("20m", 1200), ("1h30m", 5400), ("0.5m", 30)])
def test_duration_is_read(text: str, want: float) -> None:
    assert seconds_of(text) == want


@pytest.mark.parametrize(
    "text", ["", "20", "m", "20 m", "-5m", "0s", "5d", "9" * 400 + "h", "1e9h", "400d", "9000h"]
)
def test_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--budget"):
        seconds_of(text)


def test_limits_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="--attempts 0"):
        TaskBudget(attempts=0)


def test_first_reached_limit_is_named() -> None:
    spent = Spent(TaskBudget(seconds=1000, attempts=2, tokens=50))
    assert not spent.used_up
    spent.tokens = 60
    assert spent.used_up == "50 tokens"
    spent.attempts = 2
    assert spent.used_up == "2 attempts"
    assert spent.left()["tokens"] == 0 and spent.left()["attempts"] == 0
    spent = Spent(TaskBudget(seconds=5))
    spent.started -= 6
    assert spent.used_up == "5 seconds"
