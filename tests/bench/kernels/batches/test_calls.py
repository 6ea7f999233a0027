"""Timed calls on a CPU: one at a time, each with its inputs at its own gate, and all of them checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.batches import calls
from fk_bench.kernels.judge.batches.calls import BLOCK, LIVE_BYTES, NO_CALL, Calls
from fk_bench.kernels.judge.batches.lane import Lane, Timed
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong
from fk_bench.kernels.judge.memory.arena import Arena, memory_file
from fk_bench.kernels.judge.memory.gate import CallGate
from fk_bench.kernels.judge.memory.slots import Slots
from fk_bench.kernels.judge.processes.runner_process import RunnerError

from fastkernels.core import registry

CALL_S, EMPTY_S = 5e-5, 2e-6
SMALL, LARGE = "odd_1128", "odd_63"


class Side:
    """A side in this process: it makes the calls of a command when their gates open."""

    alive = trusted = True
    pending = False

    def __init__(self, fd: int, name: str):
        self.gate, self.name = CallGate(fd), name
        self.lane: Lane
        self.stopped, self.checked = False, 0
        self.todo: list[tuple[int, int]] = []
        self.asked: list[list[int]] = []
        self.ran: list[int] = []
        self.results: dict[int, torch.Tensor] = {}
        self.compute: Callable[[Side, int], None] = lambda side, slot: side.call(slot)
        self.seen: Callable[[Side, int], None] = lambda side, slot: None

    def begin(self, do: str, slots: list[int], tickets: list[int]) -> None:
        assert do == "calls" and len(tickets) == len(slots) + 1
        self.stopped, self.pending = False, True
        self.asked.append(slots)
        self.todo = list(zip(slots, tickets[1:], strict=True))

    def arrived(self, ticket: int) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False

    def end(self) -> None:
        assert not self.stopped, "a stopped process does not reply"
        assert self.pending, "it has replied already"
        self.todo, self.pending = [], False

    def ask(self, do: str, **arguments: Any) -> None:
        assert do == "copy"  # of `kept`
        slot = arguments["out"]
        self.lane.outputs[slot][0].copy_(self.results[slot])

    def pass_gate(self, ticket: int, nap: float, give: Callable[[], Any] | None = None) -> float:
        made = 0
        if give is None:
            assert self.stopped
            self.checked += 1
        else:
            assert not self.stopped
        while self.todo and self.todo[0][1] <= ticket:
            slot, at = self.todo.pop(0)
            if give is not None and at == ticket:
                self.seen(self, slot)
                give()
            if slot != NO_CALL:
                made += 1
                self.compute(self, slot)
            self.ran.append(slot)
        self.stopped = False
        return EMPTY_S + made * CALL_S

    def call(self, slot: int) -> None:
        (x,) = self.lane.arena.args_of(slot)
        self.results[slot] = torch.relu(x).square()
        self.lane.outputs[slot][0].copy_(self.results[slot])


@pytest.fixture
def files() -> Iterator[list[int]]:
    found = [memory_file() for _ in range(4)]
    yield found
    for fd in found:
        os.close(fd)


def made_calls(files: list[int], count: int = 10, case: str = SMALL, rounds: int = 2) -> Calls:
    spec = registry.get("relu2")
    chosen = next(c for c in spec.cases if c.name == case)
    slots = Slots(spec, lambda g: spec.inputs(chosen, "cpu", g), "cpu", count, "op", True)
    lanes = []
    for i, name in enumerate(("candidate", "baseline")):
        side = Side(files[2 + i], name)
        side.lane = Lane(side, Arena(slots, count, files[i]))  # type: ignore[arg-type]
        side.lane.outputs = [side.lane.arena.output_views(s) for s in range(count)]
        lanes.append(side.lane)
    return Calls(slots, lanes[0], lanes[1], Checks(spec, chosen, "op"), rounds)


def sides(made: Calls) -> tuple[Any, Any]:
    return made.candidate.side, made.baseline.side


@pytest.mark.parametrize("case", [SMALL, LARGE])
def test_both_sides_run_equally_often(files: list[int], case: str) -> None:
    made = made_calls(files, case=case)
    timed = Timed(Samples(1), Samples(1), Samples(1))
    made._round(timed, False)
    mine, theirs = sides(made)
    assert made._live is (made.slots.layout.stride <= LIVE_BYTES) is (case == SMALL)
    assert mine.asked == theirs.asked and sorted(s for s in mine.ran if s != NO_CALL) == list(range(10))
    assert mine.ran.count(NO_CALL) == theirs.ran.count(NO_CALL) == 10 + 10 // BLOCK
    assert mine.checked == theirs.checked == (0 if case == SMALL else len(mine.ran))
    for s in (timed.candidate, timed.baseline, timed.again):
        assert len(s.slopes) == 5 and s.time == pytest.approx(CALL_S)


def test_only_the_requests_of_the_baseline_are_subtracted(files: list[int]) -> None:
    made = made_calls(files)
    timed = Timed(Samples(1), Samples(1), Samples(1))
    passed = Side.pass_gate

    def waits(side: Any, ticket: int, *args: Any) -> float:
        slot = side.todo[0][0]
        return passed(side, ticket, *args) + (1e-3 if slot == NO_CALL else 0.0)

    made.candidate.side.pass_gate = waits.__get__(made.candidate.side)  # type: ignore[method-assign]
    made._round(timed, False)
    assert timed.candidate.time == pytest.approx(CALL_S)


def test_inputs_arrive_at_their_own_gate_only(files: list[int]) -> None:
    """Before, neither a call's inputs nor those of later calls are in the side's memory, also not in spare places."""
    made = made_calls(files)
    waiting: list[int] = []

    def looks(side: Any, slot: int) -> None:
        values = [made.slots.grid[s] for s in waiting]
        memory = side.lane.arena._grid
        assert not any(torch.equal(row, value) for row in memory for value in values)
        if slot != NO_CALL:
            waiting.remove(slot)

    made.candidate.side.seen = looks  # type: ignore[attr-defined]
    for _ in range(3):
        waiting[:] = range(10)
        made._round(None, False)
        assert not waiting


def test_output_that_changes_after_the_report_is_wrong(
    files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_calls(files)
    made.candidate.side.compute = lambda side, slot: None  # type: ignore[attr-defined]
    sample = Lane.sample

    def late(lane: Lane, slot: int) -> Any:
        lane.side.call(slot)  # type: ignore[attr-defined]
        return sample(lane, slot)

    monkeypatch.setattr(Lane, "sample", late)
    with pytest.raises(Wrong, match="changes after the call has reported its end"):
        made._round(None, False)
    assert not any(side.todo for side in sides(made))  # the next command finds no old one


@pytest.mark.parametrize("who", ["candidate", "baseline"])
def test_failed_call_is_the_one_that_is_reported(files: list[int], who: str) -> None:
    """Calls behind it have no inputs, and fail, too; a side that has replied does not reply again."""
    made = made_calls(files)
    by_name = {side.name: side for side in sides(made)}
    failed, other = by_name[who], by_name["baseline" if who == "candidate" else "candidate"]

    def fails(ticket: int, *args: Any) -> float:
        failed.pending = False
        raise RunnerError(Status.RUNTIME_ERROR, "a first failure", False, who)

    def ends() -> None:
        other.pending = False
        raise RunnerError(Status.RUNTIME_ERROR, "IndexError of a call without inputs", False, other.name)

    failed.pass_gate, other.end = fails, ends
    with pytest.raises(RunnerError, match="a first failure"):
        made._round(None, False)
    assert not other.pending and failed.stopped


@pytest.mark.parametrize("wrong", range(10))
def test_every_timed_call_is_compared(files: list[int], wrong: int) -> None:
    made = made_calls(files)
    made._round(None, False)

    def one(side: Any, slot: int) -> None:
        side.call(slot)
        if slot == wrong:
            side.lane.outputs[slot][0][0] += 1

    made.candidate.side.compute = one  # type: ignore[attr-defined]
    with pytest.raises(Wrong, match="in a timed call"):
        made._round(None, False)


def test_a_call_that_writes_nothing_is_wrong(files: list[int]) -> None:
    made = made_calls(files)
    made.candidate.side.compute = lambda side, slot: None  # type: ignore[attr-defined]
    with pytest.raises(Wrong, match="wrote nothing"):
        made._round(None, False)


def test_long_runs_have_secret_lengths_beyond_a_round(files: list[int]) -> None:
    made = made_calls(files)
    side = sides(made)[0]
    for _ in range(30):
        made._long_run(1e-6)
    lengths = [len(slots) for slots in side.asked]
    assert len(set(lengths)) > 10 and min(lengths) >= 10 and 100 < max(lengths) <= calls.LONGEST + 10
    side.asked.clear()
    made._long_run(1.0)  # slow calls
    assert len(side.asked[0]) < 20


def test_change_after_forty_calls_in_a_row_is_wrong(files: list[int]) -> None:
    made = made_calls(files)
    row = [0]

    def counts(side: Any, slot: int) -> None:
        row[0] += 1
        side.call(slot)
        if row[0] > 40:
            side.lane.outputs[slot][0].mul_(2)

    made.candidate.side.compute = counts  # type: ignore[attr-defined]
    with pytest.raises(Wrong):
        for _ in range(40):
            row[0] = 0
            made._long_run(1e-6)


def test_calls_that_write_arguments_get_new_inputs_in_long_runs(files: list[int]) -> None:
    """A second call on the same arguments would start from the results of the first."""
    made = made_calls(files)
    made.slots.may_change = {0}
    side = sides(made)[0]

    def writes(side: Any, slot: int) -> None:
        side.call(slot)
        assert torch.equal(side.lane.arena.row(slot), made.slots.grid[slot])
        side.lane.arena.args_of(slot)[0].zero_()

    side.compute = writes
    checked: list[int] = []
    made.checks.sampled = lambda slots, arena, slot, *rest: checked.append(slot)  # type: ignore[method-assign]
    made._long_run(1e-6)
    assert len(side.ran) == len(side.asked[0]) and checked
