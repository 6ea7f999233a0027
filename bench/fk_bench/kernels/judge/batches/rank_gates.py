"""The common gate of a side's ranks: when all have reported a call, and which of them failed."""

from __future__ import annotations

import time

import torch

from fk_bench.kernels.judge.correctness.checks import Wrong, same_bits
from fk_bench.kernels.judge.correctness.rank_checks import Lane
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.processes.team import Team

NAP_S = 2e-5  # between looks at the gates
LOOK_S = 0.05
clock = time.perf_counter  # of both sides' times


def passed(
    team: Team,
    tickets: list[int],
    nap: float = NAP_S,
    limit: float | None = None,
    asleep: float | None = None,
) -> float:
    """Wait until all ranks have reported these tickets; returns when the last one did. Raises Wrong and RunnerError.

    nap     seconds between looks; 0: the ranks do not need this thread's core
    limit   seconds; None: those of a command
    asleep  seconds after which stopped ranks are resumed: their graphs may have work for the host
    """
    start = looked = clock()
    waiting, limit = dict(enumerate(tickets)), team.limit if limit is None else min(limit, team.limit)
    try:
        while True:
            for rank in [r for r, t in waiting.items() if _passed(team, r, t)]:
                del waiting[rank]
            now = clock()
            if not waiting:
                return now
            if asleep is not None and now - start > asleep:
                asleep = None
                team.resume()
            if now - looked > LOOK_S:
                looked = now
                answered = [r for r in waiting if team.ranks[r].channel.readable()]
                # A rank may have reported its ticket, and answered, between the two looks.
                if failed := [r for r in answered if not _passed(team, r, waiting[r])]:
                    _failed(team, failed, list(waiting), now - start)
            if now - start > limit:
                raise team.blame({}, sorted(waiting), now - start)
            if nap:
                time.sleep(nap)
    finally:
        team.spend(clock() - start)


def _passed(team: Team, rank: int, ticket: int) -> bool:
    gate = team.ranks[rank].gate
    assert gate is not None
    return gate.passed(ticket, 0.0)


def _failed(team: Team, failed: list[int], waiting: list[int], waited: float) -> None:
    """Some ranks answered before their calls were made: they failed, or are to be blamed. Raises RunnerError."""
    errors = {}
    for rank in failed:
        try:
            team.ranks[rank].end()
            raise Wrong(f"in a timed call: rank {rank} answered before its calls were made")
        except RunnerError as error:
            errors[rank] = error
    found = team.blame(errors, [r for r in waiting if r not in failed], waited)
    team.kill()  # the other ranks wait in the middle of their calls
    raise RunnerError(found.status, str(found), True, found.who)


def unchanged(lane: Lane, slot: int, before: list[list[torch.Tensor]]) -> None:
    """Nothing may change any more once the last rank has reported its end. Raises Wrong."""
    for rank, (mine, old) in enumerate(zip(lane.written(slot), before, strict=True)):
        if not all(map(same_bits, mine, old)):
            raise Wrong(
                f"in a timed call: rank {rank}: an output changes after the call has reported its end"
            )
