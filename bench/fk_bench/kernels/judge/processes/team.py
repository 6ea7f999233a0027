"""The processes of all ranks of one side: commands go to all of them, and one that fails ends the others."""

from __future__ import annotations

import contextlib
import os
import random
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Status
from fk_bench.kernels.judge.cage import cage
from fk_bench.kernels.judge.memory.arena import memory_file
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess, TimeBudget
from fk_bench.kernels.judge.processes.sides import Seat, Sides

GRACE_S = 2.0  # a rank whose peer has failed gets so long to answer: its answer says who failed
QUEUED_S = 3.0  # a command that only launches takes so long at most
EARLIER = 0.6  # of the judge's time: ranks give up before the judge does, and say whom they waited for
RANDOM = random.SystemRandom()


class Team:
    """One side's ranks. `who` is 'candidate' or 'baseline'; files: a user's, for a cage around each rank.

    timeout  seconds for one command
    Raises RunnerError if a rank does not start.
    """

    def __init__(self, sides: Sides, who: str, size: int, timeout: float, files: Sequence[Path] = ()):
        self.who, self.size, self.timeout = who, size, timeout
        self.trusted, self.alive = not files, True
        self.budgets: tuple[TimeBudget, ...] = ()
        self.busy_s = 0.0
        self.arenas = [memory_file() for _ in range(size)]
        self._files = [*self.arenas, *(gates := [memory_file() for _ in range(size)]), group := memory_file()]
        self.ranks: list[RunnerProcess] = []
        spaces: dict[str, int] = {}
        user = 0
        cores = sorted(os.sched_getaffinity(0))
        try:
            for rank in range(size):
                core = cores[rank % len(cores)] if sides.device == "cpu" else None
                seat = Seat(core, gates[rank], self.arenas[rank], {"group": group, **spaces}, rank == 0, user)
                self.ranks.append(sides.spawn(who, files, seat))
                if rank == 0 and files:
                    first = self.ranks[0]
                    spaces = cage.namespaces(first.child.pid, first.pid, first.cage)
                    user = first.child.number
        except BaseException:
            self.close()
            raise
        finally:
            for fd in spaces.values():
                os.close(fd)

    def join(self, device: str) -> None:
        """Let the ranks form their group. Raises RunnerError."""
        (stored,) = self._all("store", {0: {}})
        every = {"size": self.size, "port": stored.port, "device": device, "late_s": EARLIER * self.timeout}
        self.ask("join", each=lambda rank: {"rank": rank, **every})

    def ask(
        self, do: str, each: Callable[[int], Mapping[str, Any]] | None = None, late: Sequence[float] = (),
        fds: Callable[[int], Sequence[int]] | None = None, **arguments: Any,
    ) -> list[Any]:  # fmt: skip
        """The replies of all ranks to a command. Raises RunnerError, which names the rank that failed.

        each  further arguments of each rank
        late  seconds after which each rank gets the command; nothing: at once
        """
        wanted = {r: {**arguments, **(each(r) if each else {})} for r in range(self.size)}
        return self._all(do, wanted, late, fds)

    def _all(
        self, do: str, wanted: Mapping[int, Mapping[str, Any]], late: Sequence[float] = (),
        fds: Callable[[int], Sequence[int]] | None = None,
    ) -> list[Any]:  # fmt: skip
        start = time.perf_counter()
        try:
            self._send(do, wanted, late, fds)
            return self.end(wanted)
        finally:
            self.spend(time.perf_counter() - start)

    def _send(
        self, do: str, wanted: Mapping[int, Mapping[str, Any]], late: Sequence[float] = (),
        fds: Callable[[int], Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        for rank in sorted(wanted, key=lambda r: late[r] if late else 0.0):
            wait = (late[rank] if late else 0.0) - (time.perf_counter() - start)
            if wait > 0:
                time.sleep(wait)
            with self._as_rank(rank):
                self.ranks[rank].begin(do, fds(rank) if fds else (), **wanted[rank])

    def queue(self, tickets: Sequence[Sequence[int]], slots: Sequence[int], counts: Sequence[int]) -> bool:
        """Let all ranks queue these calls behind their gates. False: a GPU's queue is too short for them.

        The driver then holds the launch until work ahead of it is done, which waits for its gate: the gates are opened.
        """
        start = time.perf_counter()
        try:
            self._send(
                "queue",
                {r: {"tickets": tickets[r], "slots": slots, "counts": counts} for r in range(self.size)},
            )
            until = start + min(QUEUED_S, self.limit)
            fits = all(side.channel.readable(max(until - time.perf_counter(), 0.0)) for side in self.ranks)
            if not fits:
                for side, mine in zip(self.ranks, tickets, strict=True):
                    side.gate.open(mine[-1])  # type: ignore[union-attr]
            self.end(range(self.size))
            return fits
        finally:
            self.spend(time.perf_counter() - start)

    def end(self, ranks: Iterator[int] | Mapping[int, Any] | Sequence[int]) -> list[Any]:
        """The replies of these ranks to the commands that were sent. Raises RunnerError; one that hangs ends all."""
        waiting, answers, errors = set(ranks), dict[int, Any](), dict[int, RunnerError]()
        begin = time.monotonic()
        until = begin + self.limit
        while waiting and time.monotonic() < until:
            sockets = {self.ranks[r].channel.sock: r for r in waiting}
            for sock in select.select(list(sockets), [], [], max(until - time.monotonic(), 0))[0]:
                rank = sockets[sock]
                waiting.discard(rank)
                try:
                    answers[rank] = self.ranks[rank].end()
                except RunnerError as error:
                    errors[rank] = error
                    until = min(until, time.monotonic() + GRACE_S)
        if not waiting and not errors:
            return [answers[r] for r in sorted(answers)]
        raise self.blame(errors, sorted(waiting), time.monotonic() - begin)

    def blame(self, errors: Mapping[int, RunnerError], silent: Sequence[int], waited: float) -> RunnerError:
        """The failure of the side: of a rank that ended, else that raised an error, else of those that gave no answer.

        A rank that only waited for another one is not to blame; its error is added. The other ranks are ended if one
        is lost or silent. waited: seconds for their answers.
        """
        died = {r: e for r, e in errors.items() if e.fatal}
        raised = {r: e for r, e in errors.items() if not e.fatal and not _waited(e)}
        causes = died or raised or ({} if silent else dict(errors))
        said = "; ".join(f"rank {r} says: {str(e)[:300]}" for r, e in errors.items() if r not in causes)
        if not causes:
            names = " and ".join(f"rank {r}" for r in silent)
            return self._lost(Status.TIMEOUT, f"{names} gave no answer in {waited:.3g} s", said)
        rank, error = next(iter(causes.items()))
        if died or silent:
            return self._lost(error.status, f"rank {rank}: {error}", said)
        return RunnerError(error.status, f"rank {rank}: {error}", False, self.who)

    def _lost(self, status: Status, reason: str, said: str) -> RunnerError:
        self.kill()
        return RunnerError(status, f"{reason}; {said}" if said else reason, True, self.who)

    @property
    def limit(self) -> float:
        """Seconds that a command may take."""
        return min([self.timeout, *(max(b.left, 0.01) for b in self.budgets)])

    def spend(self, seconds: float) -> None:
        """Count seconds that the ranks were waited for."""
        self.busy_s += seconds
        for budget in self.budgets:
            budget.used += seconds

    @contextlib.contextmanager
    def _as_rank(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RunnerError as error:
            raise self.blame({rank: error}, (), 0.0) from None

    @property
    def stopped(self) -> bool:
        return all(side.stopped for side in self.ranks)

    def stop(self) -> None:
        """Stop all ranks. Raises RunnerError."""
        for rank, side in enumerate(self.ranks):
            with self._as_rank(rank):
                side.stop()

    def check_stopped(self) -> None:
        """Raises RunnerError unless no rank has run since they were stopped."""
        for rank, side in enumerate(self.ranks):
            with self._as_rank(rank):
                side.check_stopped()

    def resume(self) -> None:
        """Resume all ranks, in random order."""
        for side in RANDOM.sample(self.ranks, self.size):
            side.resume()

    def kill(self) -> None:
        """End all ranks."""
        self.alive = False
        for side in self.ranks:
            side.alive = False
            side.child.kill()

    def close(self) -> None:
        """End all ranks and free their memory."""
        self.kill()
        for side in self.ranks:
            side.close()
        for fd in self._files:
            os.close(fd)
        self._files, self.ranks = [], []


def _waited(error: RunnerError) -> bool:
    """Whether a rank reports that another one did not come: it can only name one of its own side."""
    text = str(error)
    return text.startswith("CollectiveError:") or any(name in text.lower() for name in ("gloo", "nccl"))
