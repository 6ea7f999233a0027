"""Calls of an op are an engine's only if one of its steps made them."""

from __future__ import annotations

from typing import Any

import pytest
from fk_integrations.live.engine_counts import EngineCounts

from fastkernels.core.candidate_scopes import Scope
from fastkernels.core.dispatch import Op


@pytest.fixture
def counts() -> Any:
    found: Any = EngineCounts(Scope("an engine"))
    found._ops = [Op("first", ()), Op("second", ())]
    found.only_steps()
    return found


def test_only_calls_in_steps_count(counts: Any) -> None:
    first, second = counts._ops

    def step(runs: int) -> int:
        first.calls += runs
        second.leave("a reason") if runs > 1 else None
        return runs

    run = counts.during(step)
    assert run(0) == 0 and counts.steps == {}  # a step that replays a graph
    first.calls += 5  # of another engine
    assert run(2) == 2 and run(1) == 1
    second.leave("a reason")
    assert counts.steps["first"].calls == 3 and counts.steps["second"].left == {"a reason": 1}
    assert first.unowned == 5 and counts.steps["second"].calls == 0


def test_steps_in_steps_count_once(counts: Any) -> None:
    first, _ = counts._ops

    def inner() -> None:
        first.calls += 1

    step = counts.during(inner)
    with counts.running():
        step()
        first.calls += 1
    assert counts.steps["first"].calls == 2


def test_a_step_that_fails_counts_too(counts: Any) -> None:
    def fails() -> None:
        counts._ops[0].calls += 1
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        counts.during(fails)()
    assert counts.steps["first"].calls == 1 and not counts._running
