"""CPU: timed calls of both sides, one at a time, with the judge's clock around each.

A side waits in front of a gate. Small inputs are copied while it waits, inside the clock, as its caches are warm then.
For larger ones it is stopped, and the clock starts when it is resumed, after the judge has seen that it has not run
meanwhile. The clock stops when the call is reported; the judge copies the outputs at once. So the inputs of one call
are there at a time, and only while the clock runs: no work can be moved to another call or out of the time. The time of
a request that calls nothing is subtracted.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.batches.lane import Lane, Sampled, Timed, check_written
from fk_bench.kernels.judge.clock.call_times import Samples, unsteady
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong
from fk_bench.kernels.judge.memory.slots import Slots
from fk_bench.kernels.judge.processes import priority
from fk_bench.kernels.judge.processes.runner_process import RunnerError

NO_CALL = -1  # a slot
# Bytes of a call's arguments that are copied inside the clock. A side that sees them arrive can start so much earlier:
# below 3 us. A stop costs more: the first 35 us of a resumed side are slower (two cores of an EPYC, 2026-11-28).
LIVE_BYTES = 32 << 10
BLOCK = 5  # calls of one side in a row
PROBED = 32  # elements of each output that are read when a call reports its end
COMPARED_ROUNDS = 2  # secret rounds for which a baseline prepares its weights
EXTENDED = 3  # times as many rounds while the machine seems to disturb them
NAP_S = 5e-5  # between looks at the gate on a machine with one core
RUNS = 2  # untimed runs of many calls
RUN_S, LONGEST = 0.03, 400  # seconds and calls of the longest one
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
RANDOM = random.SystemRandom()


@dataclass
class Sent:
    """A command for calls of a lane: the tickets of those that are still to come, in order."""

    lane: Lane
    tickets: list[int]


class Calls:
    """The timed part of a case on a CPU; its slots are called once a round. Raises Wrong and RunnerError."""

    def __init__(self, slots: Slots, candidate: Lane, baseline: Lane, checks: Checks, rounds: int):
        self.slots, self.candidate, self.baseline, self.checks = slots, candidate, baseline, checks
        self.rounds = rounds
        self.count = slots.count // 2 * 2
        self._nap = 0.0
        self._live = slots.layout.stride <= LIVE_BYTES and not slots.layout.shared

    def run(self) -> Timed:
        """Time both sides, with real-time priority if the user may have it."""
        sides = self.candidate.side, self.baseline.side
        self.slots.refresh()
        for lane in (self.candidate, self.baseline):
            lane.outputs = [lane.arena.output_views(s) for s in range(self.slots.count)]
            self._prepare(lane)
        with _away_from(sides[0].pid) as away, priority.raised([side.pid for side in sides]) as report:
            self._nap = 0.0 if away else NAP_S
            timed = Timed(Samples(1), Samples(1), Samples(1), priority=report)
            compared = set(RANDOM.sample(range(self.rounds), min(COMPARED_ROUNDS, self.rounds)))
            for r in range(-1, EXTENDED * self.rounds):  # the first one warms up
                if r >= self.rounds and not unsteady(timed.baseline, timed.again) and timed.candidate.steady:
                    break
                self._round(timed if r >= 0 else None, r in compared or r >= self.rounds)
            for _ in range(RUNS):
                self._long_run(float(np.median(timed.candidate.double)))
        return timed

    # -- a round

    def _round(self, timed: Timed | None, compared: bool) -> None:
        """Call every slot once on both sides, in random order, with as many requests that call nothing."""
        self._old = self.slots.grid[0].clone()
        self.slots.refresh()
        lanes = self.candidate, self.baseline
        for lane in lanes:
            lane.side.stop()
            if compared:
                self._prepare(lane)
        order = RANDOM.sample(range(self.count), self.count)
        blocks = [self._block(order[at : at + BLOCK]) for at in range(0, self.count, BLOCK)]
        asked = [slot for block in blocks for slot in block]
        held: dict[bool, dict[int, Sampled]] = {True: {}, False: {}}
        times: dict[tuple[bool, bool], list[float]] = {}
        with self._sent(self.candidate, asked) as mine, self._sent(self.baseline, asked) as theirs:
            for block in blocks:
                for sent in RANDOM.sample((mine, theirs), 2):
                    self._call(sent, NO_CALL)  # the first one after the other side's is slow
                    for slot in block[1:]:  # requests without a call of the candidate keep the sides alike
                        seconds, sample = self._call(sent, slot)
                        times.setdefault((sent is mine, slot == NO_CALL), []).append(seconds)
                        if sample is not None:
                            held[sent is mine][slot] = sample
                    sent.lane.side.stop()
        if timed is not None:
            _add(timed, times[True, False], times[False, False], times[False, True])
        # Without weights of this round a baseline's outputs are those of other inputs.
        self._check(held[True], held[False] if compared or not self.baseline.prepares else {})
        # A buffer that is used again within the round has overwritten an earlier result.
        for slot in {order[0], RANDOM.choice(order[:-1])}:
            self.checks.kept(self.candidate.side, self.candidate.arena, self.slots, slot)

    @PHASES.of("prepare")
    def _prepare(self, lane: Lane) -> None:
        lane.prepare(0, self.slots.count)

    @staticmethod
    def _block(slots: list[int]) -> list[int]:
        mixed = [*slots, *[NO_CALL] * len(slots)]
        return [NO_CALL, *RANDOM.sample(mixed, len(mixed))]

    @contextlib.contextmanager
    def _sent(self, lane: Lane, asked: list[int]) -> Iterator[Sent]:
        """Send a command, and stop the side in front of the first gate; at the end, read its reply and stop it."""
        gate, side = lane.side.gate, lane.side
        assert gate is not None
        tickets = [gate.ticket() for _ in range(len(asked) + 1)]
        side.begin("calls", slots=asked, tickets=tickets)
        side.arrived(tickets[0])
        side.stop()

        def leave() -> None:  # after a failure, too: the next command must find it without this one
            if side.alive and side.pending:
                gate.open(tickets[-1])
                side.resume()
                side.end()
            if side.alive:
                side.stop()

        try:
            yield Sent(lane, tickets[1:])
        except BaseException:
            # The other calls have no inputs: what they raise says nothing.
            with contextlib.suppress(RunnerError):
                leave()
            raise
        leave()

    @PHASES.of("calls")
    def _call(self, sent: Sent, slot: int) -> tuple[float, Sampled | None]:
        """The seconds of one call, and what it wrote; None without a call."""
        lane, ticket = sent.lane, sent.tickets.pop(0)
        if slot == NO_CALL:
            return self._pass(lane, ticket, lane.arena.spare, self._old), None
        lane.poison(slot)
        probes = _probes([*lane.outputs[slot], *lane.changing(slot)])
        seconds = self._pass(lane, ticket, lane.arena.row(slot), self.slots.grid[slot])
        # First these, because a call whose end was reported too early may still be under way.
        seen = [torch.take(words, at) for words, at in probes]
        sample = lane.sample(slot)
        for before, (words, at) in zip(seen, _probed(sample, probes), strict=True):
            if lane is self.candidate and not torch.equal(before, torch.take(words, at)):
                raise Wrong("in a timed call: an output changes after the call has reported its end")
        return seconds, sample

    def _pass(self, lane: Lane, ticket: int, into: torch.Tensor, values: torch.Tensor) -> float:
        """Give a call its inputs, open its gate, and return the seconds that it took."""
        if self._live:
            lane.side.resume()
            return lane.side.pass_gate(ticket, self._nap, lambda: into.copy_(values))
        lane.side.stop()
        into.copy_(values)
        return lane.side.pass_gate(ticket, self._nap)

    @PHASES.of("compare")
    def _check(self, mine: dict[int, Sampled], theirs: dict[int, Sampled]) -> None:
        """Compare all calls with the baseline's; the oracle decides on the most different one and on a random one."""
        order = sorted(mine)
        for sample in mine.values():
            check_written(sample.outputs)
        picked = {RANDOM.choice(order)}
        if theirs:
            of = [[[*side[s].outputs, *side[s].args] for s in order] for side in (mine, theirs)]
            picked.add(order[int(self.checks.distances(*of).argmax())])
        for slot in picked:
            mine[slot].check(self.checks, self.slots, self.candidate.arena)

    # -- many calls in a row

    @PHASES.of("runs")
    def _long_run(self, seconds: float) -> None:
        """Let the candidate make a secret number of calls without a stop, and check the last call of every slot.

        A candidate that changes after so many calls is wrong then. Where calls write arguments, the slots get new
        inputs after each call of all, behind a gate. seconds: of a call, about.
        """
        lane, count = self.candidate, self.count
        most = max(count, min(LONGEST, int(RUN_S / max(seconds, 1e-6))))
        calls = int(count * (most / count) ** RANDOM.random()) + secrets.randbelow(count)
        slots = [i % count for i in range(calls)]
        step = count if self.slots.may_change else calls
        lane.side.stop()
        self.slots.refresh()
        with self._sent(lane, slots) as sent:
            for at in range(0, calls, step):
                self._run_part(sent, slots[at : at + step], sent.tickets[min(at + step, calls) - 1])

    def _run_part(self, sent: Sent, slots: list[int], ticket: int) -> None:
        lane, last = sent.lane, slots[-self.count :]
        for slot in last:
            lane.arena.publish(slot, 1)
            lane.poison(slot)
        lane.side.pass_gate(ticket, self._nap)
        lane.side.stop()
        made = {slot: lane.sample(slot) for slot in last}
        for slot in {last[0], last[-1], RANDOM.choice(last)}:
            made[slot].check(self.checks, self.slots, lane.arena)
        for sample in made.values():
            check_written(sample.outputs)


def _add(timed: Timed, mine: list[float], theirs: list[float], none: list[float]) -> None:
    """Two calls of each side make a sample; the baseline's two are its two sets. All requests of a round count."""
    for i in range(0, len(mine), 2):
        empty = (none[i] + none[i + 1]) / 2
        timed.candidate.add_call((mine[i] + mine[i + 1]) / 2, empty)
        timed.baseline.add_call(theirs[i], empty)
        timed.again.add_call(theirs[i + 1], empty)


Probes = list[tuple[torch.Tensor, torch.Tensor]]  # (what a call wrote, as integers; secret positions)


def _probes(written: list[torch.Tensor]) -> Probes:
    return [
        (_words(v), torch.tensor([secrets.randbelow(v.numel()) for _ in range(PROBED)]))
        for v in written if v.numel()
    ]  # fmt: skip


def _probed(sample: Sampled, probes: Probes) -> Probes:
    """The same positions in a copy of what the call wrote."""
    copies = [v for v in (*sample.outputs, *sample.args) if v.numel()]
    return [(_words(v), at) for v, (_, at) in zip(copies, probes, strict=True)]


def _words(t: torch.Tensor) -> torch.Tensor:
    return t.view(INTEGERS[t.element_size()])


@contextlib.contextmanager
def _away_from(pid: int) -> Iterator[bool]:
    """Keep the calling thread off the core of a side; whether there is another one."""
    before = os.sched_getaffinity(0)
    other = before - os.sched_getaffinity(pid)
    if other:
        os.sched_setaffinity(0, other)
    try:
        yield bool(other)
    finally:
        os.sched_setaffinity(0, before)
