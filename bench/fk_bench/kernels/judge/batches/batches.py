"""Timed batches of both sides, interleaved, with the judge's clock around them.

A side is stopped while its inputs are made and its outputs are poisoned; the timed request resumes it. On a GPU, where
queued work survives the stop, the copy of the fresh inputs is inside the clock. Lengths of batches are secret, and some
requests are for one call alone: on a GPU it is queued behind a gate and a producer before its inputs are made, so that
its time has neither the process nor the launch in it. In secret rounds the outputs of all calls are compared between
the sides; on a CPU some later calls of a running batch are given new inputs then, so a result that was computed ahead
is wrong.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from fk_bench.core.rows import Status
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.clock.timing import Samples, batched, counted_alone, unsteady
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong, same_bits
from fk_bench.kernels.judge.memory import ipc, layout, producer
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.outputs import BadPlace, map_outputs
from fk_bench.kernels.judge.memory.place import Place
from fk_bench.kernels.judge.memory.slots import FLUSH_BYTES, Slots, poison
from fk_bench.kernels.judge.processes import priority
from fk_bench.kernels.judge.processes.messages import Traced
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess

TRACED = 32  # calls traced by CUPTI
GRAPH_CALLS = 64  # most calls of a graph
POISONED = 32  # outputs per batch
CHECKED_ROUNDS = 1  # early rounds in which two sampled calls are checked; in the others one
COMPARED_ROUNDS = {"cpu": 2, "cuda": 3}  # secret rounds in which the outputs of all calls are compared
# GPU: requests for one call per round, and in all rounds, of each side: such short times scatter. On a CPU one a round.
ALONE_REQUESTS, ALONE_LEAST = 8, 96
QUEUED = 8  # GPU: calls alone that are queued by one request, each behind its own gate
ALONE_CHECKED = 4  # GPU: the outputs of one in so many are checked
PASS_S = 5.0  # a queued call may take so long
SWAPPED = 4  # CPU: calls of a running batch that get new inputs
SWAP_PARTS = (0.1, 0.5)  # when: after so much of the batch's expected time
WRITTEN = 16  # a call that writes fewer bytes cannot be told from one that did not run
EXTENDED = 3  # times as many rounds while the machine seems to disturb them
SINGLES = 16  # GPU: calls with a graph each, behind the 2n calls of batches
RANDOM = random.SystemRandom()


@dataclass
class Lane:
    """One side in a timed case: its process, its memory, and the places of its outputs by slot.

    prepares  it runs a baseline that prepares weights
    """

    side: RunnerProcess
    arena: Arena
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    prepares: bool = False


@dataclass
class Timed:
    """Times of both sides; `again` is a second set of batches of the baseline.

    own       CPU: a second set of the candidate's, which counts like the first. A side that runs more often is faster
              there, by 3 to 6% for calls of 10 us, so both must run equally often. None on a GPU
    traced    the candidate's claim
    priority  CPU: whether real-time priority was on, or why it was off
    """

    candidate: Samples
    baseline: Samples
    again: Samples
    traced: Traced = field(default_factory=Traced)
    priority: str = "on"
    own: Samples | None = None


@dataclass
class Sampled:
    """Copies of a call's outputs and written arguments, made by the judge before the clock stopped."""

    slot: int
    outputs: list[torch.Tensor]
    args: list[torch.Tensor]


class Batches:
    """The timed part of a case with 2n slots, and SINGLES more on a GPU. Raises Wrong and RunnerError."""

    def __init__(self, slots: Slots, n: int, candidate: Lane, baseline: Lane, checks: Checks, rounds: int):
        self.slots, self.candidate, self.baseline, self.checks = slots, candidate, baseline, checks
        self.rounds, self.cuda = rounds, slots.device == "cuda"
        self.n, self.singles = n, slots.count - 2 * n
        precise = self.cuda and not slots.layout.shared  # shared inputs take long to make
        calls = max(ALONE_REQUESTS, -(-ALONE_LEAST // rounds)) if precise else 1
        self._alone = -(-calls // QUEUED) if self.cuda else calls
        self._queued = QUEUED if precise else 1
        self.segments = self._segments()
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda") if self.cuda else None

    def run(self) -> Timed:
        """Time both sides; on a CPU with real-time priority, if the user may have it."""
        if self.cuda:
            return self._run()
        with priority.raised([self.candidate.side.pid, self.baseline.side.pid]) as report:
            timed = self._run()
        timed.priority = report
        return timed

    def _run(self) -> Timed:
        candidate, baseline, again, own = (Samples(self.n) for _ in range(4))
        timed = Timed(candidate, baseline, again, own=None if self.cuda else own)
        mappings = [ipc.Mapping(), ipc.Mapping()]
        self.slots.refresh()
        try:
            for lane, mapping in zip((self.candidate, self.baseline), mappings, strict=True):
                lane.arena.publish()
                self._prepare_weights(lane, 0, self.slots.count)
                if self.cuda:
                    places = lane.side.ask("capture", segments=self.segments, alone=2 * self.n).outputs
                    lane.outputs = self._map(lane, places, mapping)
                else:
                    lane.outputs = [lane.arena.output_views(s) for s in range(self.slots.count)]
            compared = set(
                RANDOM.sample(range(self.rounds), min(COMPARED_ROUNDS[self.slots.device], self.rounds))
            )
            for r in range(-1, self.rounds):  # the first one warms up
                self._round(r, timed, r in compared)
            for r in range(self.rounds, EXTENDED * self.rounds):
                if not self._disturbed(timed) and (timed.candidate.steady or r >= 2 * self.rounds):
                    break
                self._round(r, timed, RANDOM.randrange(self.rounds) < len(compared))
            if self.cuda:  # at the end and on both sides, because a process is slower once CUPTI is attached
                for lane in (self.baseline, self.candidate):
                    timed.traced = lane.side.ask("trace", calls=min(TRACED, self.n))
        finally:
            for lane in (self.candidate, self.baseline):  # before this memory is unmapped
                lane.outputs = []
            for mapping in mappings:
                mapping.close()
        return timed

    @PHASES.of("memory")
    def _map(self, lane: Lane, places: list[list[Place]], mapping: ipc.Mapping) -> list[list[torch.Tensor]]:
        try:
            return map_outputs(lane.arena, places, mapping, over_inputs=lane.side.trusted)
        except BadPlace as error:
            if lane is self.candidate:
                raise Wrong(str(error)) from None
            raise RunnerError(Status.WRONG, str(error), False, "baseline") from None

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
        groups = ["long"]
        if r >= 0 or self.cuda:  # every graph is uploaded once before it is timed
            second = ["again"] if self.cuda else ["again long", "again short"]
            groups += ["short", *second, *["alone"] * self._alone]
            RANDOM.shuffle(groups)
        for group in groups:
            if group == "again":
                for long in RANDOM.sample((False, True), 2):
                    self._batch(
                        self.baseline,
                        *self._span(long),
                        timed.again if r >= 0 else None,
                        "long" if long else "short",
                    )
                continue
            if group == "alone" and self.cuda:
                self._both_alone(timed if r >= 0 else None)
                continue
            start, count = self._one() if group == "alone" else self._span(group.endswith("long"))
            if group == "alone" and not self.slots.layout.shared:
                self.slots.renew(start)
            else:
                self.slots.refresh(*self._fresh(start, count))
            if compared and group == "long":
                for lane in (self.candidate, self.baseline):
                    self._prepare_weights(lane, start, count)
            second_set = group.startswith("again")
            ran = {}
            for lane in RANDOM.sample((self.candidate, self.baseline), 2):
                if lane is self.candidate:
                    into = timed.own if second_set else timed.candidate
                else:
                    into = timed.again if second_set else timed.baseline
                ran[lane is self.candidate] = self._batch(lane, start, count, into if r >= 0 else None, group)
            # After both sides: between them it would slow the side that comes second.
            if group != "alone" or secrets.randbelow(2):
                sampled, poisoned = ran[True]
                full = not second_set and (r < CHECKED_ROUNDS or r == self.rounds - 1)
                self._check(sampled if full else sampled[:1], poisoned)
            if compared and group == "long":
                mine_of, theirs_of = (lane.outputs[:count] for lane in (self.candidate, self.baseline))
                self.checks.same(self.slots, self.candidate.arena, self.baseline.arena, mine_of, theirs_of)
            if (
                group == "long" and not self.cuda
            ):  # the outputs of a graph's calls are mapped and checked once
                # A buffer that is used again within the batch has overwritten the first result.
                for slot in {start, start + secrets.randbelow(count - 1)}:
                    self.checks.kept(self.candidate.side, self.candidate.arena, self.slots, slot)
        if compared and timed.candidate.double and not self.cuda and not self.slots.layout.shared:
            expected_s = float(np.median(timed.candidate.double))
            if sum(t.nbytes for t in self._written(self.candidate, 0)) >= WRITTEN:
                self._swap(expected_s)
                self._swap_unseen(expected_s)

    @PHASES.of("prepare")
    def _prepare_weights(self, lane: Lane, start: int, count: int) -> None:
        """Let a baseline prepare the weights of these slots, neither captured nor timed, as a host does at load.

        Batches whose outputs are not compared use the weights of an earlier one, which take as long.
        """
        if lane.prepares and lane.side.trusted:
            lane.arena.publish(start, count)
            lane.side.ask("prepare", start=start, count=count)
            lane.side.stop()

    @PHASES.of("batches")
    def _batch(
        self, lane: Lane, start: int, count: int, into: Samples | None, group: str
    ) -> tuple[list[Sampled], list[int]]:
        """One timed request; before a call alone, only its own inputs are refreshed."""
        lane.side.stop()
        fresh = (start, 1) if group == "alone" and not self.slots.layout.shared else self._fresh(start, count)
        poisoned = RANDOM.sample(range(start, start + count), min(count, POISONED))
        self._poison(lane, poisoned)
        places = self._places(lane, sorted({start + secrets.randbelow(count), start + count - 1}))
        given = 0.0
        if self.cuda:
            torch.cuda.synchronize()
        else:
            lane.arena.publish(*fresh)
        begin = time.perf_counter()
        if self._flush is not None:
            given = self._give(lane, fresh)
            self._flush.sum()
            torch.cuda.synchronize()
        lane.side.begin("run", start=start, count=count)
        answer = lane.side.end()
        held = self._read(places)
        seconds = time.perf_counter() - begin
        lane.side.stop()
        if into is not None:
            if group == "alone":
                into.alone.append(seconds)
            else:
                into.add(group.endswith("long"), seconds, answer.events_s, count)
                if self.cuda:
                    into.given.append(given)
        return held, poisoned

    @PHASES.of("swap")
    def _swap(self, expected_s: float) -> None:
        """CPU: stop a batch on its way and give later calls new inputs: each must use what is there when it is made.

        expected_s: seconds of a long batch. If the batch has ended by then, nothing is checked.
        """
        lane, (start, count) = self.candidate, self._span(long=True)
        self._prepare(lane, start, count)
        before = [[v.clone() for v in lane.outputs[s]] for s in range(start, start + count)]
        lane.side.begin("run", start=start, count=count)
        time.sleep(expected_s * RANDOM.uniform(*SWAP_PARTS))
        lane.side.stop()
        # The first call without a result may be under way. One result may equal the poison by chance, three will not.
        waiting = [not self._wrote(lane, start + i, views) for i, views in enumerate(before)]
        reached = next((i for i in range(count) if all(waiting[i : i + 3])), count)
        later = range(start + reached + 2, start + count)
        near = later[: SWAPPED // 2]
        swapped = sorted({*near, *RANDOM.sample(later, min(SWAPPED - len(near), len(later)))})
        for slot in swapped:
            self.slots.renew(slot, part=bool(secrets.randbelow(2)))
            lane.arena.publish(slot, 1)
        lane.side.resume()
        lane.side.end()
        self._check(self._read(self._places(lane, swapped)), swapped)

    @PHASES.of("swap")
    def _swap_unseen(self, expected_s: float) -> None:
        """CPU: give later calls of a running batch a few new values without a stop, which a clock would show.

        A call counts only if the one before it had not ended when the new values were there.
        """
        lane, (start, count) = self.candidate, self._span(long=True)
        later = range(start + max(3, count // 3) + secrets.randbelow(4), start + count, 4)
        if not later:
            return
        self._prepare(lane, start, count)
        before = {s: [v.clone() for v in lane.outputs[s]] for s in range(start, start + count)}
        picked = RANDOM.sample(later, min(SWAPPED, len(later)))
        for slot in picked:
            self.slots.renew(slot, part=True)
        lane.side.begin("run", start=start, count=count)
        time.sleep(expected_s * RANDOM.uniform(0.0, SWAP_PARTS[1]))
        for slot in sorted(picked, reverse=True):
            lane.arena.publish(slot, 1)
        in_time = []
        for slot in sorted(picked):
            if not any(self._wrote(lane, s, before[s]) for s in range(slot - 1, slot - 4, -1)):
                in_time.append(slot)
        lane.side.end()
        lane.side.stop()
        self._check(self._read(self._places(lane, in_time)), in_time)

    def _prepare(self, lane: Lane, start: int, count: int) -> None:
        """New inputs and poisoned outputs for a batch that is not timed; the side is stopped."""
        lane.side.stop()
        self.slots.refresh(start, count)
        lane.arena.publish(start, count)
        self._poison(lane, list(range(start, start + count)))

    def _wrote(self, lane: Lane, slot: int, poisoned: list[torch.Tensor]) -> bool:
        """Whether a call has changed its poisoned outputs or an argument."""
        return not all(
            map(same_bits, self._written(lane, slot), [*poisoned, *self._changing(self.slots, slot)])
        )

    def _written(self, lane: Lane, slot: int) -> list[torch.Tensor]:
        return [*lane.outputs[slot], *self._changing(lane.arena, slot)]

    def _changing(self, memory: Arena | Slots, slot: int) -> list[torch.Tensor]:
        """The arguments of a call that the op may write."""
        args = enumerate(memory.args_of(slot))
        return [t for i, a in args if i in self.slots.may_change for t in layout.tensors(a)]

    @PHASES.of("alone")
    def _both_alone(self, timed: Timed | None) -> None:
        """GPU: time calls alone on both sides, then check some of the candidate's.

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
        finally:  # after a failure too: work that still waits would block the next command
            side.gate.open(tickets[-1])
        return sampled

    def _open(self, lane: Lane, slot: int, ticket: int, timed: Timed | None) -> list[Sampled]:
        """Give a queued call its inputs, open its gate, and take the time until its outputs are read."""
        side, gate = lane.side, lane.side.gate
        assert gate is not None and self._flush is not None
        if shared := bool(self.slots.layout.shared):
            self.slots.refresh(0, self.slots.count)
        else:
            self.slots.renew(slot)
        self._poison(lane, [slot])
        places = self._places(lane, [slot])
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
        held = self._read(places)
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

    def _places(
        self, lane: Lane, slots: list[int]
    ) -> list[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
        """(slot, outputs, written arguments) in the side's memory."""
        return [(s, lane.outputs[s], self._changing(lane.arena, s)) for s in slots]

    def _read(self, places: list[tuple[int, list[torch.Tensor], list[torch.Tensor]]]) -> list[Sampled]:
        held = [
            Sampled(s, [v.clone() for v in views], [t.clone() for t in args]) for s, views, args in places
        ]
        if self.cuda:
            torch.cuda.synchronize()
        return held

    def _fresh(self, start: int, count: int) -> tuple[int, int]:
        """(start, count) of the slots to refresh before a batch; all on a GPU, where the copy is inside the clock, and
        all if they share memory.
        """
        return (0, self.slots.count) if self.cuda or self.slots.layout.shared else (start, count)

    def _give(self, lane: Lane, slots: tuple[int, int]) -> float:
        """Copy the inputs by a kernel, which work of the other process delays; returns the seconds it took."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        lane.arena.publish(*slots)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _poison(self, lane: Lane, picked: list[int]) -> None:
        first, size = lane.arena.bytes.data_ptr(), lane.arena.bytes.nbytes
        for s in picked:  # except memory that is also an argument
            poison([v for v in lane.outputs[s] if not self.cuda or not 0 <= v.data_ptr() - first < size])

    def _check(self, sampled: list[Sampled], poisoned: list[int]) -> None:
        for held in sampled:
            self.checks.sampled(self.slots, self.candidate.arena, held.slot, held.outputs, held.args)
        left = [
            (v.reshape(-1).view(torch.uint8) == 0xFF).all()
            for s in poisoned for v in self.candidate.outputs[s] if v.is_floating_point() and v.numel()
        ]  # fmt: skip
        if left and bool(torch.stack(left).any()):
            raise Wrong("a timed call wrote nothing")

    # -- lengths

    def _segments(self) -> list[list[int]]:
        """Secret cuts of the slots into graphs of up to GRAPH_CALLS calls, and of one call behind 2n."""
        most = max(1, min(GRAPH_CALLS, self.n // 4))
        cuts, at = {0, self.n, 2 * self.n}, 0
        while at < 2 * self.n:
            at += RANDOM.randint(-(-most // 2), most)
            cuts |= {min(at, 2 * self.n)}
        ordered = [*sorted(cuts), *range(2 * self.n + 1, self.slots.count + 1)]
        return [[a, b] for a, b in itertools.pairwise(ordered)]

    def _span(self, long: bool) -> tuple[int, int]:
        """(start, count) of a batch: all slots, or a secret part of about half of them."""
        if long:
            return 0, 2 * self.n
        if not self.cuda:
            count = max(1, self.n - secrets.randbelow(max(self.n // 4, 1)))
            return secrets.randbelow(self.slots.count - count + 1), count
        start = RANDOM.choice([s for s, _ in self.segments if s <= self.n])
        ends = [e for _, e in self.segments if 0.75 * self.n <= e - start <= self.n]
        return (start, RANDOM.choice(ends) - start) if ends else (0, self.n)

    def _one(self) -> tuple[int, int]:
        if self.singles:
            return 2 * self.n + secrets.randbelow(self.singles), 1
        return secrets.randbelow(self.slots.count), 1
