"""CPU: timed calls of a collective. All ranks wait at gates, and the time ends when the last one reports.

All ranks of both sides are stopped while a call's inputs are made. Then the gates of one side open, its ranks are
resumed, and the clock runs until each has reported: the time is the maximum over the ranks. In some calls one rank is
resumed later; these are checked, but not counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator

import torch

from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.batches.calls import NO_CALL
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.batches.rank_gates import passed, unchanged
from fk_bench.kernels.judge.clock.call_times import Samples, unsteady
from fk_bench.kernels.judge.correctness.rank_checks import LATE_S, Lane, RankChecks
from fk_bench.kernels.judge.processes import priority
from fk_bench.kernels.judge.processes.runner_process import RunnerError

RANDOM = random.SystemRandom()
SITUATIONS = ("", "", "", "repeated rank", "repeated others", "zero rank", "equal ranks")
EXTENDED = 3  # times as many rounds while the machine seems to disturb them
LATE = 1  # calls of a round that are not timed, because a rank is late


class RankCalls:
    """The timed part of a case; its slots are called once a round on both sides. Raises Wrong and RunnerError."""

    def __init__(self, checks: RankChecks, candidate: Lane, baseline: Lane, count: int, rounds: int):
        self.checks, self.candidate, self.baseline = checks, candidate, baseline
        self.count, self.rounds = count // 2 * 2, rounds

    def run(self) -> Timed:
        pids = [side.pid for lane in (self.candidate, self.baseline) for side in lane.team.ranks]
        # On a shared core a rank in front of its gate would never let the other one run.
        apart = len(self.candidate.team.ranks) <= len(os.sched_getaffinity(0))
        with (
            priority.raised(pids) if apart else contextlib.nullcontext("off: more ranks than cores") as report
        ):
            timed = Timed(Samples(1), Samples(1), Samples(1), priority=report)
            for r in range(-1, EXTENDED * self.rounds):  # the first one warms up
                if r >= self.rounds and not unsteady(timed.baseline, timed.again) and timed.candidate.steady:
                    break
                self._round(timed if r >= 0 else None)
        return timed

    def _round(self, timed: Timed | None) -> None:
        lanes = self.candidate, self.baseline
        for lane in lanes:
            lane.team.stop()
        for slot in range(self.count):
            self.checks.fill(slot, RANDOM.choice(SITUATIONS))
        order = RANDOM.sample(range(self.count), self.count)
        late = set(RANDOM.sample(order, LATE))
        asked = [at for slot in order for at in (NO_CALL, slot)]
        times: dict[tuple[bool, bool], list[float]] = {}
        got: dict[int, list[list[torch.Tensor]]] = {}
        with self._sent(self.candidate, asked) as mine, self._sent(self.baseline, asked) as theirs:
            for slot in order:
                for lane, tickets in RANDOM.sample([(self.candidate, mine), (self.baseline, theirs)], 2):
                    own = lane is self.candidate
                    empty = self._call(lane, tickets, NO_CALL)
                    seconds = self._call(lane, tickets, slot, slot in late)
                    if own:
                        got[slot] = lane.written(slot)
                        unchanged(lane, slot, got[slot])
                    lane.team.stop()
                    if slot not in late:
                        times.setdefault((own, True), []).append(seconds)
                        times.setdefault((own, False), []).append(empty)
        if timed is not None:
            self._add(timed, times)
        for slot, written in got.items():
            self.checks.verdict(self.candidate, slot, written, "in a timed call: ")

    @staticmethod
    def _add(timed: Timed, times: dict[tuple[bool, bool], list[float]]) -> None:
        mine, theirs = times[True, True], times[False, True]
        for i in range(0, len(mine) - 1, 2):
            empty = sum(times[own, False][i + k] for own in (True, False) for k in (0, 1)) / 4
            timed.candidate.add_call((mine[i] + mine[i + 1]) / 2, empty)
            timed.baseline.add_call(theirs[i], empty)
            timed.again.add_call(theirs[i + 1], empty)

    @contextlib.contextmanager
    def _sent(self, lane: Lane, asked: list[int]) -> Iterator[list[list[int]]]:
        """Send the calls to all ranks and stop them in front of their first gates; at the end, read their replies."""
        team = lane.team
        tickets = []
        for side in team.ranks:
            assert side.gate is not None
            tickets.append([side.gate.ticket() for _ in range(len(asked) + 1)])
            side.begin("calls", slots=asked, tickets=tickets[-1])
        passed(team, [t[0] for t in tickets])
        team.stop()
        left = [t[1:] for t in tickets]

        def leave() -> None:  # after a failure, too: the next command must find all ranks without this one
            if team.alive and all(left):
                for side, mine in zip(team.ranks, left, strict=True):
                    side.gate.open(mine[-1])  # type: ignore[union-attr]
            if team.alive:
                team.resume()
                team.end(range(team.size))
                team.stop()

        try:
            yield left
        except BaseException:
            # The other calls have no inputs: what they raise says nothing.
            with contextlib.suppress(RunnerError):
                leave()
            raise
        leave()

    @PHASES.of("calls")
    def _call(self, lane: Lane, tickets: list[list[int]], slot: int, late: bool = False) -> float:
        """The seconds until the last rank has reported the end of its call."""
        team, now = lane.team, [t.pop(0) for t in tickets]
        team.stop()
        if slot != NO_CALL:
            lane.publish(slot)
            lane.poison(slot)
        team.check_stopped()
        for side, ticket in zip(team.ranks, now, strict=True):
            side.gate.open(ticket)  # type: ignore[union-attr]
        order = RANDOM.sample(team.ranks, team.size)
        begin = time.perf_counter()
        for side in order[1:] if late else order:
            side.resume()
        if late:
            time.sleep(RANDOM.uniform(0, LATE_S))
            order[0].resume()
        return passed(team, now) - begin
