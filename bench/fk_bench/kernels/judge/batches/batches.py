"""GPU: timed batches of both sides, interleaved, with the judge's clock around them.

A side is stopped while its inputs are made and its outputs are poisoned; the timed request resumes it. Queued work
survives the stop, so the copy of the fresh inputs is inside the clock. Lengths of batches are secret, and some requests
are for one call alone: it is queued behind a gate and a producer before its inputs are made, so that its time has
neither the process nor the launch in it. In secret rounds the outputs of all calls are compared between the sides.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time

import torch

from fk_bench.core.rows import Status
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.batches.lane import Lane, Sampled, Timed, check_written, mapped
from fk_bench.kernels.judge.clock.call_times import Samples, batched, counted_alone, unsteady
from fk_bench.kernels.judge.correctness.checks import Checks
from fk_bench.kernels.judge.memory import ipc, producer
from fk_bench.kernels.judge.memory.slots import FLUSH_BYTES, Slots
from fk_bench.kernels.judge.processes.runner_process import RunnerError

TRACED = 32  # calls traced by CUPTI
GRAPH_CALLS = 64  # most calls of a graph
POISONED = 32  # outputs per batch
CHECKED_ROUNDS = 1  # early rounds in which two sampled calls are checked; in the others one
COMPARED_ROUNDS = 3  # secret rounds in which the outputs of all calls are compared
# Requests for one call per round, and in all rounds, of each side: such short times scatter.
ALONE_REQUESTS, ALONE_LEAST = 8, 96
QUEUED = 8  # calls alone that are queued by one request, each behind its own gate
ALONE_CHECKED = 4  # the outputs of one in so many are checked
PASS_S = 5.0  # a queued call may take so long
EXTENDED = 3  # times as many rounds while the machine seems to disturb them
SINGLES = 16  # calls with a graph each, behind the 2n calls of batches
RANDOM = random.SystemRandom()


class Batches:
    """The timed part of a case with 2n slots, and SINGLES more. Raises Wrong and RunnerError."""

    def __init__(self, slots: Slots, n: int, candidate: Lane, baseline: Lane, checks: Checks, rounds: int):
        self.slots, self.candidate, self.baseline, self.checks = slots, candidate, baseline, checks
        self.rounds, self.n, self.singles = rounds, n, slots.count - 2 * n
        precise = not slots.layout.shared  # shared inputs take long to make
        self._alone = -(-max(ALONE_REQUESTS, -(-ALONE_LEAST // rounds)) // QUEUED) if precise else 1
        self._queued = QUEUED if precise else 1
        self.segments = self._segments()
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=slots.device)

    def run(self) -> Timed:
        """Time both sides."""
        timed = Timed(Samples(self.n), Samples(self.n), Samples(self.n))
        mappings = [ipc.Mapping(), ipc.Mapping()]
        self.slots.refresh()
        try:
            for lane, mapping in zip((self.candidate, self.baseline), mappings, strict=True):
                lane.arena.publish()
                self._prepare_weights(lane)
                places = lane.side.ask("capture", segments=self.segments, alone=2 * self.n).outputs
                lane.outputs = mapped(lane.arena, places, mapping, lane is self.candidate, lane.side.trusted)
            compared = set(RANDOM.sample(range(self.rounds), min(COMPARED_ROUNDS, self.rounds)))
            for r in range(-1, self.rounds):  # the first one warms up, and uploads every graph
                self._round(r, timed, r in compared)
            for r in range(self.rounds, EXTENDED * self.rounds):
                if not self._disturbed(timed) and (timed.candidate.steady or r >= 2 * self.rounds):
                    break
                self._round(r, timed, RANDOM.randrange(self.rounds) < len(compared))
            # At the end and on both sides, because a process is slower once CUPTI is attached
            for lane in (self.baseline, self.candidate):
                timed.traced = lane.side.ask("trace", calls=min(TRACED, self.n))
        finally:
            for lane in (self.candidate, self.baseline):  # before this memory is unmapped
                lane.outputs = []
            for mapping in mappings:
                mapping.close()
        return timed

    @staticmethod
    def _disturbed(timed: Timed) -> bool:
        """Whether more rounds may change the verdict: a busy machine also delays some calls alone."""
        sides = timed.candidate, timed.baseline
        return bool(
            unsteady(timed.baseline, timed.again)
            or batched(*sides, suspected=True)
            or counted_alone(*sides, suspected=True)
        )

    # -- a round

    def _round(self, r: int, timed: Timed, compared: bool) -> None:
        groups = ["long", "short", "again", *["alone"] * self._alone]
        RANDOM.shuffle(groups)
        for group in groups:
            if group == "again":
                for long in RANDOM.sample((False, True), 2):
                    self._batch(self.baseline, *self._span(long), timed.again if r >= 0 else None, long)
                continue
            if group == "alone":
                self._both_alone(timed if r >= 0 else None)
                continue
            long = group == "long"
            start, count = self._span(long)
            self.slots.refresh()
            if compared and long:
                for lane in (self.candidate, self.baseline):
                    self._prepare_weights(lane, count)
            ran = {}
            for lane in RANDOM.sample((self.candidate, self.baseline), 2):
                into = timed.candidate if lane is self.candidate else timed.baseline
                ran[lane is self.candidate] = self._batch(lane, start, count, into if r >= 0 else None, long)
            # After both sides: between them it would slow the side that comes second.
            sampled, poisoned = ran[True]
            full = r < CHECKED_ROUNDS or r == self.rounds - 1
            self._check(sampled if full else sampled[:1], poisoned)
            if compared and long:
                mine_of, theirs_of = (lane.outputs[:count] for lane in (self.candidate, self.baseline))
                self.checks.same(self.slots, self.candidate.arena, mine_of, theirs_of)

    @PHASES.of("prepare")
    def _prepare_weights(self, lane: Lane, count: int | None = None) -> None:
        lane.prepare(0, self.slots.count if count is None else count)

    @PHASES.of("batches")
    def _batch(
        self, lane: Lane, start: int, count: int, into: Samples | None, long: bool
    ) -> tuple[list[Sampled], list[int]]:
        """One timed request: sampled calls, and the slots whose outputs were poisoned."""
        lane.side.stop()
        poisoned = RANDOM.sample(range(start, start + count), min(count, POISONED))
        for slot in poisoned:
            lane.poison(slot)
        sampled = sorted({start + secrets.randbelow(count), start + count - 1})
        torch.cuda.synchronize()
        begin = time.perf_counter()
        given = self._give(lane, (0, self.slots.count))
        self._flush.sum()
        torch.cuda.synchronize()
        looked = time.perf_counter()
        lane.side.check_stopped()
        looked = time.perf_counter() - looked
        lane.side.begin("run", start=start, count=count)
        answer = lane.side.end()
        held = self._read(lane, sampled)
        seconds = time.perf_counter() - begin - looked
        lane.side.stop()
        if into is not None:
            into.add(long, seconds, answer.events_s, count)
            into.given.append(given)
        return held, poisoned

    @PHASES.of("alone")
    def _both_alone(self, timed: Timed | None) -> None:
        """Time calls alone on both sides, then check some of the candidate's.

        A check slows the call after it by some microseconds, so there is none between the calls of a side. Each side
        has slots of its own, because a check needs the inputs of its call.
        """
        slots = RANDOM.sample(range(2 * self.n, self.slots.count), 2 * self._queued)
        later: list[tuple[list[Sampled], list[int]]] = []
        for lane in RANDOM.sample((self.candidate, self.baseline), 2):
            mine, slots = slots[: self._queued], slots[self._queued :]
            sampled = self._gated(lane, mine, timed)
            if lane is self.candidate:
                later.append((sampled, mine))
            if self.slots.layout.shared and later:  # the other side's call makes its inputs anew
                self._check(*later.pop())
        for sampled, mine in later:
            self._check(sampled, mine)

    def _gated(self, lane: Lane, picked: list[int], timed: Timed | None) -> list[Sampled]:
        """Time calls one by one that were queued before their inputs were made, while their process is stopped.

        Returns some of them, of both sides, so that neither uses more of the judge's memory.
        """
        side = lane.side
        assert side.gate is not None
        tickets = [side.gate.ticket() for _ in picked]
        side.ask("queue", slots=picked, tickets=tickets)
        side.stop()
        sampled: list[Sampled] = []
        try:
            for slot, ticket in zip(picked, tickets, strict=True):
                held = self._open(lane, slot, ticket, timed)
                sampled += held if not secrets.randbelow(ALONE_CHECKED) else []
            side.check_stopped()
        finally:  # after a failure too: work that still waits would block the next command
            side.gate.open(tickets[-1])
        return sampled

    def _open(self, lane: Lane, slot: int, ticket: int, timed: Timed | None) -> list[Sampled]:
        """Give a queued call its inputs, open its gate, and take the time until its outputs are read."""
        side, gate = lane.side, lane.side.gate
        assert gate is not None
        if shared := bool(self.slots.layout.shared):
            self.slots.refresh(0, self.slots.count)
        else:
            self.slots.renew(slot)
        lane.poison(slot)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        given = self._give(lane, (0, self.slots.count) if shared else (slot, 1))
        if (values := producer.region(self.slots.plan, lane.arena.args_of(slot))) is not None:
            turned = bool(secrets.randbelow(2))
            values.mul_(-1 if turned else 1)
            gate.turn(turned)
        self._flush.sum()
        torch.cuda.synchronize()
        opened = time.perf_counter()
        gate.open(ticket)
        done = gate.passed(ticket, PASS_S)
        passed = time.perf_counter() - opened
        held = self._read(lane, [slot])
        alone = time.perf_counter() - begin - given
        if not done:
            reason = f"a queued call did not end in {PASS_S:g} s after its inputs were there"
            raise RunnerError(Status.TIMEOUT, reason, True, side.name)
        if timed is not None:
            into = timed.candidate if lane is self.candidate else timed.baseline
            into.alone.append(alone)
            into.passed.append(passed)
            into.produced = values is not None
        return held

    @staticmethod
    def _read(lane: Lane, slots: list[int]) -> list[Sampled]:
        held = [lane.sample(slot) for slot in slots]
        torch.cuda.synchronize()
        return held

    def _give(self, lane: Lane, slots: tuple[int, int]) -> float:
        """Copy the inputs by a kernel, which work of the other process delays; returns the seconds it took."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        lane.arena.publish(*slots)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _check(self, sampled: list[Sampled], poisoned: list[int]) -> None:
        for held in sampled:
            held.check(self.checks, self.slots, self.candidate.arena)
        check_written([v for s in poisoned for v in self.candidate.outputs[s]])

    # -- lengths

    def _segments(self) -> list[list[int]]:
        return cut(self.n, self.slots.count)

    def _span(self, long: bool) -> tuple[int, int]:
        return part(self.segments, self.n, long)


def cut(n: int, count: int, most: int | None = None) -> list[list[int]]:
    """Secret cuts of 2n slots into graphs of up to `most` calls (default: GRAPH_CALLS), and of one call behind them."""
    most = max(1, min(GRAPH_CALLS, n // 4)) if most is None else most
    cuts, at = {0, n, 2 * n}, 0
    while at < 2 * n:
        at += RANDOM.randint(-(-most // 2), most)
        cuts |= {min(at, 2 * n)}
    ordered = [*sorted(cuts), *range(2 * n + 1, count + 1)]
    return [[a, b] for a, b in itertools.pairwise(ordered)]


def part(segments: list[list[int]], n: int, long: bool) -> tuple[int, int]:
    """(start, count) of a batch: all of 2n slots, or a secret part of about half of them."""
    if long:
        return 0, 2 * n
    start = RANDOM.choice([s for s, _ in segments if s <= n])
    ends = [e for _, e in segments if 0.75 * n <= e - start <= n]
    return (start, RANDOM.choice(ends) - start) if ends else (0, n)
