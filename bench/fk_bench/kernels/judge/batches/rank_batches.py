"""GPUs: timed batches of a collective. All ranks wait at gates, and the time ends when the last one reports.

Each rank queues captured graphs behind its gate and is stopped. The judge makes the inputs of all ranks, empties the
L2 caches and opens the gates, so that a batch has neither a process nor a launch in it. The time of a call is the slope
between batches of N and 2N calls; it is the maximum over the ranks, because the judge's clock runs until all outputs
are read. In some calls one rank's gate opens later; these are checked, but not timed.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import torch

from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.batches import rank_gates
from fk_bench.kernels.judge.batches.batches import cut, part
from fk_bench.kernels.judge.batches.lane import Timed, check_written, mapped
from fk_bench.kernels.judge.batches.rank_calls import SITUATIONS
from fk_bench.kernels.judge.batches.rank_gates import passed, unchanged
from fk_bench.kernels.judge.clock.call_times import Samples, batched, unsteady
from fk_bench.kernels.judge.correctness.rank_checks import LATE_S, Lane, RankChecks, on
from fk_bench.kernels.judge.memory import ipc
from fk_bench.kernels.judge.memory.slots import FLUSH_BYTES

SINGLES = 12  # calls with a graph each, behind the 2n calls of batches
ALONE = 4  # of them, in each round: timed calls of each side
LATE = 2  # of them, in each round: calls of the candidate with a late rank
POISONED = 16  # outputs per batch
COMPARED = 8  # calls of a batch that are compared with the oracle in secret rounds; in the others two
COMPARED_ROUNDS = 2  # of these rounds
PASS_S = 20.0  # a queued batch may take so long
ASLEEP_S = 0.05  # ranks are resumed after so long, because a graph may have work for the host
EXTENDED = 3  # times as many rounds while the machine seems to disturb them
RANDOM = random.SystemRandom()
Written = list[list[torch.Tensor]]  # what each rank wrote in a call


class TooMany(Exception):
    """A GPU's queue is too short for so many calls of this side behind a closed gate."""

    def __init__(self, who: str, calls: int):
        super().__init__(f"{calls} calls cannot be queued on a GPU")
        self.who = who


class RankBatches:
    """The timed part of a case with 2n slots, and SINGLES more. Raises Wrong, RunnerError and TooMany."""

    def __init__(self, checks: RankChecks, candidate: Lane, baseline: Lane, n: int, rounds: int):
        self.checks, self.candidate, self.baseline = checks, candidate, baseline
        self.n, self.rounds = n, rounds
        self.count = checks.values.ranks[0].count
        # Of graphs with NCCL's kernels, 8 can be queued behind a closed gate, and 16 cannot (H200).
        self.segments = cut(n, self.count, most=n)
        self._awake = False  # ranks run while their graphs do
        self._flushed = [torch.zeros(FLUSH_BYTES // 4, device=p) for p in checks.values.places if "cuda" in p]

    def run(self) -> Timed:
        """Time both sides."""
        timed = Timed(Samples(self.n), Samples(self.n), Samples(self.n))
        mappings: list[ipc.Mapping] = []
        self._refresh(0, self.count)
        try:
            for lane in (self.candidate, self.baseline):
                lane.publish(0, None)
                lane.outputs = self._capture(lane, mappings)
                lane.team.ask("run", start=0, count=self.count)  # uploads every graph
                lane.team.stop()
            compared = set(RANDOM.sample(range(self.rounds), min(COMPARED_ROUNDS, self.rounds)))
            for r in range(-1, EXTENDED * self.rounds):  # the first one warms up
                if r >= self.rounds and not self._disturbed(timed):
                    break
                self._round(timed if r >= 0 else None, r in compared)
        finally:
            for lane in (self.candidate, self.baseline):  # before this memory is unmapped
                lane.outputs = []
            for mapping in mappings:
                mapping.close()
        return timed

    @staticmethod
    def _disturbed(timed: Timed) -> bool:
        """Whether more rounds may change the verdict."""
        return bool(
            unsteady(timed.baseline, timed.again)
            or batched(timed.candidate, timed.baseline, suspected=True)
            or not timed.candidate.steady
        )

    @PHASES.of("memory")
    def _capture(self, lane: Lane, mappings: list[ipc.Mapping]) -> list[list[list[torch.Tensor]]]:
        """Let all ranks capture their graphs; returns each rank's outputs by slot."""
        replies = lane.team.ask("capture", segments=self.segments, alone=self.count)
        lane.team.stop()
        found = []
        for rank, (arena, reply) in enumerate(zip(lane.arenas, replies, strict=True)):
            mappings.append(ipc.Mapping())
            own = lane is self.candidate
            with on(arena.bytes.device):
                found.append(
                    mapped(arena, reply.outputs, mappings[-1], own, lane.team.trusted, f"rank {rank}: ")
                )
        return found

    # -- a round

    def _round(self, timed: Timed | None, compared: bool) -> None:
        groups = ["long", "short", "again", "alone", "late"]
        for group in RANDOM.sample(groups, len(groups)):
            if group == "again":  # with the inputs that are there
                for long in RANDOM.sample((False, True), 2):
                    self._batch(self.baseline, long, timed.again if timed else None)
            elif group == "alone":
                self._both_alone(timed)
            elif group == "late":
                self._late()
            else:
                self._both(group == "long", timed, COMPARED if compared else 2)

    def _both(self, long: bool, timed: Timed | None, sampled: int) -> None:
        """A batch of each side with the same inputs; the candidate's outputs are checked after both."""
        self._refresh(0, 2 * self.n)
        got: dict[int, Written] = {}
        for lane in RANDOM.sample((self.candidate, self.baseline), 2):
            own = lane is self.candidate
            into = (timed.candidate if own else timed.baseline) if timed else None
            made = self._batch(lane, long, into, sampled)
            got = made if own else got
        self._verdicts(got)

    @PHASES.of("batches")
    def _batch(self, lane: Lane, long: bool, into: Samples | None, sampled: int = 2) -> dict[int, Written]:
        """One timed batch; returns what sampled calls wrote, among them the last one."""
        start, count = part(self.segments, self.n, long)
        last = start + count - 1
        others = RANDOM.sample(range(start, last), min(sampled, count) - 1)
        poisoned = {last, *others, *RANDOM.sample(range(start, last), min(count - 1, POISONED))}
        with self._queued(lane, [start], [count]) as (tickets,):
            self._give(lane, range(0, 2 * self.n), poisoned)
            begin, _ = self._pass(lane, tickets)
            got = {last: lane.written(last)}
            seconds = rank_gates.clock() - begin
            lane.team.stop()
        unchanged(lane, last, got[last])
        got |= {slot: lane.written(slot) for slot in others}
        if lane is self.candidate:
            for rank in range(lane.team.size):
                check_written([v for slot in poisoned for v in lane.outputs_of(rank, slot)])
        if into is not None:
            into.add(long, seconds, None, count)
        return got

    @PHASES.of("alone")
    def _both_alone(self, timed: Timed | None) -> None:
        """Time calls alone on both sides, then check one of the candidate's. Each side has slots of its own."""
        picked = RANDOM.sample(range(2 * self.n, self.count), 2 * ALONE)
        self._refresh(2 * self.n, self.count)
        got: dict[int, Written] = {}
        for lane in RANDOM.sample((self.candidate, self.baseline), 2):
            mine, picked = picked[:ALONE], picked[ALONE:]
            into = (timed.candidate if lane is self.candidate else timed.baseline) if timed else None
            with self._queued(lane, mine, [1] * ALONE) as queued:
                for slot, tickets in zip(mine, queued, strict=True):
                    self._give(lane, range(slot, slot + 1), {slot})
                    begin, end = self._pass(lane, tickets)
                    written = lane.written(slot)
                    if into is not None:
                        into.alone.append(rank_gates.clock() - begin)
                        into.passed.append(end - begin)
                    lane.team.stop()
                    got = {slot: written} if lane is self.candidate else got
        self._verdicts(got)

    def _late(self) -> None:
        """Check calls of the candidate with a late rank."""
        lane, slots = self.candidate, RANDOM.sample(range(2 * self.n, self.count), LATE)
        self._refresh(2 * self.n, self.count)
        got = {}
        with self._queued(lane, slots, [1] * LATE) as queued:
            for slot, tickets in zip(slots, queued, strict=True):
                self._give(lane, range(slot, slot + 1), {slot})
                self._pass(lane, tickets, late=RANDOM.uniform(0, LATE_S))
                got[slot] = lane.written(slot)
                unchanged(lane, slot, got[slot])
                lane.team.stop()
        self._verdicts(got)

    # -- a batch

    @PHASES.of("inputs")
    def _refresh(self, start: int, end: int) -> None:
        """Give these calls new values."""
        for slot in range(start, end):
            self.checks.fill(slot, RANDOM.choice(SITUATIONS))

    @contextlib.contextmanager
    def _queued(self, lane: Lane, slots: list[int], counts: list[int]) -> Iterator[list[list[int]]]:
        """Let all ranks queue calls, and stop them. Gives the tickets of all ranks for each entry of `slots`."""
        team = lane.team
        tickets = [[side.gate.ticket() for _ in slots] for side in team.ranks]  # type: ignore[union-attr]
        if not team.queue(tickets, slots, counts):
            raise TooMany(team.who, sum(counts))
        team.stop()
        try:
            yield [list(of_ranks) for of_ranks in zip(*tickets, strict=True)]
        finally:  # after a failure too: work that still waits would block the next command
            for side, mine in zip(team.ranks, tickets, strict=False):
                side.gate.open(mine[-1])  # type: ignore[union-attr]

    def _give(self, lane: Lane, slots: range, poisoned: set[int]) -> None:
        """Put the inputs of these calls into the ranks' memory, and read so much that no cache has any of them."""
        lane.team.stop()
        for slot in poisoned:
            lane.poison(slot)
        lane.publish(slots.start, len(slots))
        for flush in self._flushed:
            flush.sum()
        lane.wait()

    def _pass(self, lane: Lane, tickets: list[int], late: float = 0.0) -> tuple[float, float]:
        """Open the gates of all ranks, one of them so many seconds later. Returns when, and when the last one reported.

        Ranks stay stopped, unless an earlier batch has needed them.
        """
        team, order = lane.team, RANDOM.sample(range(lane.team.size), lane.team.size)
        team.check_stopped()
        begin = rank_gates.clock()
        for rank in order:
            if late and rank == order[-1]:
                time.sleep(late)
            team.ranks[rank].gate.open(tickets[rank])  # type: ignore[union-attr]
        if self._awake:
            team.resume()
        end = passed(team, tickets, 0.0, PASS_S, ASLEEP_S)
        self._awake = self._awake or not team.stopped
        return begin, end

    def _verdicts(self, got: dict[int, Written]) -> None:
        for slot, written in got.items():
            self.checks.verdict(self.candidate, slot, written, "in a timed call: ")
