"""The time left of a run."""

from __future__ import annotations

import io

import pytest
from fk_bench.core.terminal.progress import Display, TimeLeft
from rich.console import Console


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_left_follows_the_steps_that_are_done() -> None:
    clock = Clock()
    left = TimeLeft({"start": (2, 60.0), "round": (4, 40.0)}, clock)
    assert left.seconds() == 100.0
    clock.now += 60  # a start took twice the estimate: so may the rounds
    left.advance("start")
    assert left.seconds() == pytest.approx(60 + 4 * 20)
    clock.now += 5  # a round took half of it
    left.advance("round")
    assert left.seconds() == pytest.approx(60 + 3 * 5)
    clock.now += 2
    assert left.seconds() == pytest.approx(60 + 3 * 5 - 2)


def test_time_left_without_an_estimate_is_unknown_at_first() -> None:
    clock = Clock()
    left = TimeLeft({"": (3, 0.0)}, clock)
    assert left.seconds() is None
    clock.now += 4
    left.advance("")
    assert left.seconds() == pytest.approx(8)


def test_time_left_is_shown_on_a_terminal_and_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True, width=120), {"round": (10, 600.0)}) as display:
        display.doing("vllm c=8 round 1")
    assert "vllm c=8 round 1" in out.getvalue() and "about 10.0 minutes left" in out.getvalue()
    log = io.StringIO()
    monkeypatch.setattr("fk_bench.core.terminal.progress._EVERY_S", -1.0)
    with Display(Console(file=log), {"round": (2, 600.0)}) as display:
        display.left.spent["round"] = 120.0
        display.advance("round")
    assert "1 of 2 steps done, about 2.0 minutes left" in log.getvalue()
