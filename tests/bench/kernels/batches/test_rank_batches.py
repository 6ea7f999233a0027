"""Timed batches of a collective on GPUs: the common gate of all ranks, late ranks, and what is checked.

The ranks are objects of this process: their gates, clock and captured calls are simulated, values and checks are real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.batches import lane, rank_batches, rank_gates
from fk_bench.kernels.judge.batches.rank_batches import SINGLES, RankBatches, TooMany
from fk_bench.kernels.judge.clock import call_times, roofline
from fk_bench.kernels.judge.correctness.cases import Trial, maker
from fk_bench.kernels.judge.correctness.checks import Wrong
from fk_bench.kernels.judge.correctness.rank_checks import Lane, RankChecks
from fk_bench.kernels.judge.correctness.rank_values import Values
from fk_bench.kernels.judge.memory.arena import Arena, memory_file
from fk_bench.kernels.judge.processes import team as teams
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.processes.team import Team

from fastkernels.core import registry
from fastkernels.core.spec import Case

RANKS, N, START_S = 2, 6, 3e-5


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    def __init__(self, team: Ranks, rank: int):
        self.team, self.rank, self.count, self.opened = team, rank, 0, 0

    def ticket(self) -> int:
        self.count += 1
        return self.count

    def open(self, ticket: int) -> None:
        self.team.begin(self.rank, ticket)
        self.opened = ticket

    def passed(self, ticket: int, seconds: float) -> bool:
        return self.team.done(ticket)


class Ranks(Team):
    """The ranks of a side. result(args of all ranks) -> the outputs of each; call_s: seconds of a call."""

    def __init__(self, clock: Clock, call_s: float, result: Callable[[list[Any]], list[torch.Tensor]]):
        self.who, self.size, self.timeout, self.trusted, self.alive = "candidate", RANKS, 60.0, False, True
        self.budgets, self.busy_s = (), 0.0
        self.clock, self.call_s, self.result = clock, call_s, result
        self.lane: Lane
        silent = SimpleNamespace(readable=lambda: False)
        self.ranks: list[Any] = [
            SimpleNamespace(gate=Gate(self, r), channel=silent, stopped=False) for r in range(RANKS)
        ]
        self.queued: dict[int, tuple[int, int]] = {}
        self.room = 1000  # calls behind a gate
        self.waiting: dict[int, set[int]] = {}
        self.ended: set[int] = set()
        self.needs_host = self.hangs = False
        self.apart: list[float] = []  # seconds between the gates of a call
        self.first: dict[int, float] = {}

    def ask(self, do: str, each: Any = None, late: Any = (), fds: Any = None, **given: Any) -> list[Any]:
        self.resume()
        if do == "capture":
            assert given["segments"][-1][1] == given["alone"] == len(self.lane.arenas[0].cells)
            self.made = [
                [[torch.zeros(o.shape, dtype=o.dtype) for o in arena.slots.outs] for _ in arena.cells]
                for arena in self.lane.arenas
            ]
            return [SimpleNamespace(outputs=of_rank) for of_rank in self.made]
        if do == "run":
            self.run_calls(given["start"], given["count"])
        return [SimpleNamespace() for _ in range(RANKS)]

    def queue(self, tickets: Any, slots: Any, counts: Any) -> bool:
        self.resume()
        assert tickets[0] == tickets[1]  # of gates of their own, used alike
        for ticket, slot, count in zip(tickets[0], slots, counts, strict=True):
            self.queued[ticket] = slot, count
        return sum(counts) <= self.room

    def begin(self, rank: int, ticket: int) -> None:
        there = self.waiting.setdefault(ticket, set())
        if rank in there:
            return
        there.add(rank)
        self.first.setdefault(ticket, self.clock.now)
        if len(there) == RANKS:
            self.apart.append(self.clock.now - self.first[ticket])

    def done(self, ticket: int) -> bool:
        if self.hangs or (self.needs_host and self.stopped):
            self.clock.now += 1e-3
            return False
        if ticket not in self.ended:
            slot, count = self.queued[ticket]
            self.run_calls(slot, count)
            self.clock.now += START_S + count * self.call_s
            self.ended.add(ticket)
        return True

    def run_calls(self, slot: int, count: int) -> None:
        for s in range(slot, slot + count):
            results = self.result([arena.args_of(s) for arena in self.lane.arenas])
            for rank, value in enumerate(results):
                self.made[rank][s][0].copy_(value)

    def stop(self) -> None:
        for side in self.ranks:
            side.stopped = True

    def check_stopped(self) -> None:
        assert self.stopped

    def resume(self) -> None:
        for side in self.ranks:
            side.stopped = False

    def kill(self) -> None:
        self.alive = False


def summed(args: list[Any]) -> list[torch.Tensor]:
    return registry.get("all_reduce").reference([a[0].clone() for a in args])


def last_bit_of_rank_1(args: list[Any]) -> list[torch.Tensor]:
    found = summed(args)
    found[1].view(torch.int16)[0, 0] ^= 1
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(rank_gates, "clock", found)
    monkeypatch.setattr(rank_batches.time, "sleep", lambda s: setattr(found, "now", found.now + s))
    monkeypatch.setattr(lane, "map_outputs", lambda arena, outputs, *rest, **more: outputs)
    return found


@pytest.fixture
def files() -> Iterator[list[int]]:
    found = [memory_file() for _ in range(2 * RANKS)]
    yield found
    for fd in found:
        os.close(fd)


def batches(files: list[int], candidate: Ranks, baseline: Ranks, rounds: int = 5) -> RankBatches:
    spec = registry.get("all_reduce")
    case = Case("odd", {"tokens": 3, "hidden": 40, "ranks": RANKS}, "float16")
    values = Values(spec, Trial("random", case, maker(spec, case)), 2 * N + SINGLES, "cpu")
    for i, team in enumerate((candidate, baseline)):
        fds = files[RANKS * i : RANKS * (i + 1)]
        team.lane = Lane(team, [Arena(v, 0, fd) for v, fd in zip(values.ranks, fds, strict=True)])  # type: ignore[arg-type]
    baseline.trusted, baseline.who = True, "baseline"
    return RankBatches(RankChecks(values, allowed=0.0), candidate.lane, baseline.lane, N, rounds)


def test_slope_and_calls_alone_have_the_ranks_times(clock: Clock, files: list[int]) -> None:
    sides = Ranks(clock, 5e-6, summed), Ranks(clock, 8e-6, summed)
    timed = batches(files, *sides).run()
    assert timed.candidate.time == pytest.approx(5e-6) and timed.baseline.time == pytest.approx(8e-6)
    assert timed.candidate.intercept == pytest.approx(START_S)
    assert timed.candidate.passed == pytest.approx([START_S + 5e-6] * len(timed.candidate.passed))
    found = call_times.speedup(timed.candidate, timed.baseline, timed.again)
    assert found.value == pytest.approx(1.6) and not call_times.invalid(timed.candidate, timed.baseline, 0.0)
    late = [s for s in sides[0].apart if s]
    assert (
        late and max(late) <= 0.03 and not any(sides[1].apart)
    )  # some of the candidate's calls have a late rank


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda args: [summed(args)[0], torch.zeros_like(args[1][0])], "rank 1: output 0"),
        (lambda args: [a[0].clone() for a in args], "in a timed call: rank"),
(last_bit_of_rank_1, "bits"),
    ],
    ids=["first rank only", "no exchange", "other bits"],
)  # fmt: skip
def test_wrong_result_of_a_timed_call_is_found(
    clock: Clock, files: list[int], result: Callable[[list[Any]], list[torch.Tensor]], says: str
) -> None:
    candidate = Ranks(clock, 5e-6, result)
    with pytest.raises(Wrong, match=says):
        batches(files, candidate, Ranks(clock, 8e-6, summed)).run()
    # No queued work waits for a gate any longer: it would block the command that frees the case.
    assert all(gate.opened == gate.count for gate in (side.gate for side in candidate.ranks))


def test_result_of_late_calls_is_checked(clock: Clock, files: list[int]) -> None:
    candidate = Ranks(clock, 5e-6, summed)

    def unless_late(args: list[Any]) -> list[torch.Tensor]:
        late = bool(candidate.apart) and candidate.apart[-1] > 0
        return [torch.zeros_like(a[0]) for a in args] if late else summed(args)

    candidate.result = unless_late
    with pytest.raises(Wrong, match="in a timed call"):
        batches(files, candidate, Ranks(clock, 8e-6, summed)).run()


def test_graph_that_needs_the_host_gets_running_ranks(clock: Clock, files: list[int]) -> None:
    sides = Ranks(clock, 5e-6, summed), Ranks(clock, 8e-6, summed)
    sides[1].needs_host = True
    made = batches(files, *sides)
    timed = made.run()
    assert made._awake and timed.baseline.time == pytest.approx(8e-6)


def test_queue_that_is_too_short_names_its_side(clock: Clock, files: list[int]) -> None:
    sides = Ranks(clock, 5e-6, summed), Ranks(clock, 8e-6, summed)
    made = batches(files, *sides)
    sides[1].room = N
    with pytest.raises(TooMany, match="calls cannot be queued on a GPU") as error:
        made.run()
    assert error.value.who == "baseline"


def test_gates_open_if_a_launch_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver holds it until the work ahead, which waits for the gate, is done."""
    monkeypatch.setattr(teams, "QUEUED_S", 0.02)
    opened, asked = dict[int, int](), list[dict[str, Any]]()

    class Held(Ranks):
        queue = Team.queue

        def end(self, ranks: Any) -> list[Any]:
            assert self.room >= 5 or opened == {0: 2, 1: 4}
            return []

    def rank(r: int, made: Ranks) -> Any:
        return SimpleNamespace(
            begin=lambda do, fds, **given: asked.append(given),
            gate=SimpleNamespace(open=lambda ticket: opened.update({r: ticket})),
            channel=SimpleNamespace(readable=lambda seconds: made.room >= 5 or r in opened),
        )

    made = Held(Clock(), 1e-6, summed)
    made.ranks = [rank(r, made) for r in range(RANKS)]
    assert made.queue([[1, 2], [3, 4]], [0, 3], [3, 2]) and not opened
    assert asked[1] == {"tickets": [3, 4], "slots": [0, 3], "counts": [3, 2]}
    made.room = 4
    assert not made.queue([[1, 2], [3, 4]], [0, 3], [3, 2]) and made.busy_s > 0


def test_hanging_ranks_end_at_the_deadline(clock: Clock, files: list[int]) -> None:
    candidate = Ranks(clock, 5e-6, summed)
    made = batches(files, candidate, Ranks(clock, 8e-6, summed))
    candidate.hangs = True
    with pytest.raises(RunnerError, match="rank 0 and rank 1 gave no answer in 20 s") as error:
        made.run()
    assert error.value.status is Status.TIMEOUT and not candidate.alive


def test_ranks_that_answer_between_two_looks_are_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_gates, "LOOK_S", -1.0)
    looks = [0, 0]

    def gate(r: int) -> Any:
        def passed(ticket: int, seconds: float) -> bool:
            looks[r] += 1
            return looks[r] > 1

        return SimpleNamespace(passed=passed)

    made = Ranks(Clock(), 1e-6, summed)
    answered = SimpleNamespace(readable=lambda: True)
    made.ranks = [SimpleNamespace(gate=gate(r), channel=answered, stopped=False) for r in range(RANKS)]
    rank_gates.passed(made, [1, 1])
    assert looks == [3, 3] and made.alive


def test_link_limits_a_message(clock: Clock) -> None:
    peaks = roofline.peaks("NVIDIA H200")
    assert peaks is not None and peaks.link_gb_per_s == 450
    assert all(p.link_gb_per_s for _, p in roofline._KNOWN)


def test_memory_of_a_trusted_side_is_attached() -> None:
    spec = registry.get("all_reduce")
    case = Case("odd", {"tokens": 3, "hidden": 40, "ranks": RANKS}, "float16")
    values = Values(spec, Trial("random", case, maker(spec, case)), 2, "cpu")
    arena = Arena(values.ranks[0], 2, -1, theirs=True)  # type: ignore[arg-type]
    assert arena.place["theirs"] and not arena.fds
    memory = torch.zeros(arena.place["nbytes"], dtype=torch.uint8)
    arena._mapping = SimpleNamespace(bytes_at=lambda place: memory[: place["nbytes"]], close=lambda: None)  # type: ignore[assignment]
    arena.attach("0" * 128, 0)
    RankChecks(values).fill(1)
    arena.publish(1, 1)
    assert torch.equal(arena.args_of(1)[0], values.args(1)[0][0]) and memory.any()
