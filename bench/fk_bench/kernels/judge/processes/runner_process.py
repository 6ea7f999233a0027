"""A runner as the judge sees it: a process that answers commands, and whose failures have statuses.

The process runs only while a command is pending and between untimed commands: `stop` halts it, the next command
resumes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fk_bench.core.rows import Status
from fk_bench.core.terminal.text import printable
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.memory.gate import CallGate
from fk_bench.kernels.judge.processes import messages
from fk_bench.kernels.judge.processes.messages import Failed, Message
from fk_bench.kernels.judge.processes.protocol import Channel, ChannelClosed, ChannelGarbage, ChannelTimeout

STOP_S = 30.0  # a stop takes less than a millisecond, but a busy machine may not run a task for seconds
LOOK_S = 5e-3  # a call that takes longer may have failed


class RunnerError(RuntimeError):
    """The side `who` failed with `status`; `fatal`: its process is gone, or must not be used any longer."""

    def __init__(self, status: Status, reason: str, fatal: bool, who: str = ""):
        super().__init__(reason)
        self.status, self.fatal, self.who = status, fatal, who


T = TypeVar("T")


@dataclass
class TimeBudget:
    """Seconds that a side may take; what it has used is counted here."""

    seconds: float
    of: str  # 'case' or 'op'
    used: float = 0.0

    @property
    def left(self) -> float:
        return self.seconds - self.used


class RunnerProcess:
    """A runner in a child process (`child` has channel, pid, stop, resume, wait, kill and output_tail).

    trusted  it runs our own code only: its failures are believed
    gate     in front of its calls (CPU), or of the work that it queues (GPU)
    """

    def __init__(self, child: Any, name: str, timeout: float, trusted: bool, gate: CallGate | None = None):
        self.child, self.name, self.timeout, self.trusted = child, name, timeout, trusted
        self.channel = Channel(child.channel)
        self.cage: dict[str, str] = {}
        self.gate = gate
        self.pid = 0  # set by greet
        self.stopped = False
        self.alive = True
        self.pending = False  # the reply to its last command has not been read
        self.busy_s = 0.0  # seconds spent waiting for it
        self.budgets: tuple[TimeBudget, ...] = ()
        self._do, self._nonce = "", ""

    def greet(self) -> None:
        """Wait until its process has started, and read the report of its cage."""
        self.cage = self._guarded(
            lambda: messages.hello(self.channel.receive_bytes(self.timeout, 1 << 16))
        ).hello
        self.pid = self.child.newest()  # it has not imported the candidate yet

    def ask(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> Any:
        """The reply to a command, in the schema of `messages.SCHEMAS`. Raises RunnerError.

        fds  file descriptors that the process gets with it
        """
        self.begin(do, fds, **arguments)
        return self.end()

    def begin(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> None:
        """Send a command and resume the process; `end` gives its reply. Raises RunnerError."""
        self._do, self.pending = do, True
        self._nonce = self._guarded(lambda: self.channel.command(do, self.timeout, fds, **arguments))
        self.resume()

    def end(self) -> Any:
        """The reply to the command that was sent. Raises RunnerError."""
        with PHASES.of(f"wait: {self._do}"):
            return self._end()

    def _end(self) -> Any:
        wait = min([self.timeout, *(max(b.left, 0.01) for b in self.budgets)])
        body = self._guarded(lambda: self._receive(wait), wait)
        self.pending = False
        answer: Message = self._guarded(lambda: messages.answer(self._do, self._nonce, body))
        if isinstance(answer, Failed):
            status, reason = messages.believed(answer, self.trusted)
            raise RunnerError(status, reason, answer.context_lost, self.name)
        return cast(Any, answer)

    def _receive(self, wait: float) -> bytes:
        """The reply, unread; the wait is counted before a timeout is explained."""
        start = time.perf_counter()
        try:
            return self.channel.receive_bytes(wait, messages.limit(self._do))
        finally:
            self._spend(time.perf_counter() - start)

    def resume(self) -> None:
        """Let a stopped process run on."""
        if self.stopped:
            self.child.resume()
            self.stopped = False

    @PHASES.of("stop")
    def stop(self) -> None:
        """Stop all its processes and threads, and return when each is stopped. Raises RunnerError."""
        if not self.stopped:
            self.stopped = True
            if not self.child.stop(STOP_S):
                raise self.dead(Status.INVALID, f"its processes could not be stopped in {STOP_S:g} s")

    def check_stopped(self) -> None:
        """Raises RunnerError unless the process has not run at all since it was stopped."""
        if not (self.stopped and self.child.still()):
            raise self.dead(Status.INVALID, "its process ran while it was stopped")

    def arrived(self, ticket: int) -> None:
        """Wait until a command that was sent has reported this ticket. Raises RunnerError."""
        self._passed(ticket, 0.0)

    def pass_gate(self, ticket: int, nap: float, give: Callable[[], Any] | None = None) -> float:
        """Open its gate and return the seconds until it reports the ticket. Raises RunnerError.

        Its inputs are there, it is stopped in front of the gate, and the clock starts when it is resumed. With `give`,
        which copies the inputs, it runs, and the clock starts before the copy.
        """
        assert self.gate is not None
        if give is None:
            self.check_stopped()
            self.gate.open(ticket)
            begin = time.perf_counter()
            self.resume()
        else:
            begin = time.perf_counter()
            give()
            self.gate.open(ticket)
        return self._passed(ticket, nap) - begin

    def _passed(self, ticket: int, nap: float) -> float:
        """Wait until this ticket is reported; returns when that was. Raises RunnerError."""
        assert self.gate is not None
        start = time.perf_counter()
        limit = min([self.timeout, *(max(b.left, 0.01) for b in self.budgets)])
        try:
            while not self.gate.passed(ticket, LOOK_S, nap):
                # A failure, or its end. A reply is too early, unless the report came between the two looks.
                if self.channel.readable() and not self.gate.passed(ticket, 0.0):
                    self._end()
                    raise self.dead(Status.INVALID, "it answered before its calls were made")
                if time.perf_counter() - start > limit:
                    break
            else:
                return time.perf_counter()
        finally:
            self._spend(time.perf_counter() - start)
        raise self._late(limit)

    def _spend(self, seconds: float) -> None:
        self.busy_s += seconds
        for budget in self.budgets:
            budget.used += seconds

    def _guarded(self, action: Callable[[], T], wait: float | None = None) -> T:
        try:
            return action()
        except ChannelTimeout:
            raise self._late(wait or self.timeout) from None
        except ChannelGarbage as error:
            raise self.dead(Status.INVALID, f"its process sent {error}") from None
        except ChannelClosed:
            ended = self.child.wait(5.0)
            status = Status.OOM if ended is not None and ended.oom else Status.CRASH
            raise self.dead(status, f"its process ended: {ended or 'it closed its channel'}") from None

    def _late(self, wait: float) -> RunnerError:
        for budget in self.budgets:
            if budget.left < 1e-3:
                return self.dead(Status.TIMEOUT, f"it used its {budget.seconds:g} s for one {budget.of}")
        return self.dead(Status.TIMEOUT, f"no answer in {wait:g} s")

    def dead(self, status: Status, reason: str) -> RunnerError:
        """End its process; returns the error, with its last output."""
        self.alive = False
        self.child.kill()
        tail = printable(self.child.output_tail(600)).strip()
        return RunnerError(status, reason + (f"; its last output: {tail}" if tail else ""), True, self.name)

    def close(self) -> None:
        if self.alive and not self.stopped:
            with contextlib.suppress(ChannelClosed, ChannelTimeout):
                self.channel.send({"do": "bye"}, 1.0)
        self.child.close()
