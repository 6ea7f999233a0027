"""A runner as the judge sees it: a process that answers commands, and whose failures have statuses."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from fk_bench.core.rows import Status
from fk_bench.kernels.judge.processes.protocol import Channel, ChannelClosed, ChannelGarbage, ChannelTimeout


class RunnerError(RuntimeError):
    """The side `who` failed with `status`; `fatal`: its process is gone, or must not be used any longer."""

    def __init__(self, status: Status, reason: str, fatal: bool, who: str = ""):
        super().__init__(reason)
        self.status, self.fatal, self.who = status, fatal, who


class RunnerProcess:
    """A runner in a child process (`child` has channel, pid, wait, kill and output_tail)."""

    def __init__(self, child: Any, name: str, timeout: float, caged: bool):
        self.child, self.name, self.timeout, self.caged = child, name, timeout, caged
        self.channel = Channel(child.channel)
        self.cage: dict[str, str] = {}
        self.paused = False
        self._nonce = ""
        self.alive = True
        self.busy_s = 0.0  # seconds spent waiting for it

    def greet(self) -> None:
        """Wait until its process has started, and read the report of its cage."""
        self.cage = self._guarded(lambda: self.channel.receive(self.timeout)).get("hello", {})

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command. Raises RunnerError."""
        self.begin(do, **arguments)
        return self.end()

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command; `end` gives its answer. Raises RunnerError."""
        self._nonce = self._guarded(lambda: {"": self.channel.command(do, self.timeout, **arguments)})[""]

    def end(self) -> dict[str, Any]:
        """The answer to the command that was sent. Raises RunnerError."""
        start = time.perf_counter()
        try:
            answer = self._guarded(lambda: self.channel.answer(self._nonce, self.timeout))
        finally:
            self.busy_s += time.perf_counter() - start
        if "error" in answer:
            known = answer["error"] in {s.value for s in Status}
            status = Status(answer["error"]) if known else Status.FAILED
            reason = str(answer.get("reason", ""))[:2000]
            raise RunnerError(status, reason, answer.get("context_lost") is True, self.name)
        return answer

    def pause(self, on: bool) -> None:
        """Stop its processes, so that none of its threads runs during the other side's batch, or resume them."""
        if on != self.paused:
            (self.child.pause if on else self.child.resume)()
            self.paused = on

    def _guarded(self, action: Any) -> dict[str, Any]:
        try:
            return action()
        except ChannelTimeout:
            raise self._dead(Status.TIMEOUT, f"no answer in {self.timeout:g} s") from None
        except ChannelGarbage as error:
            raise self._dead(Status.INVALID, f"its process sent {error}") from None
        except ChannelClosed:
            ended = self.child.wait(5.0)
            status = Status.OOM if ended is not None and ended.oom else Status.CRASH
            raise self._dead(status, f"its process ended: {ended or 'it closed its channel'}") from None

    def _dead(self, status: Status, reason: str) -> RunnerError:
        self.alive = False
        self.child.kill()
        tail = self.child.output_tail(600).strip()
        return RunnerError(status, reason + (f"; its last output: {tail}" if tail else ""), True, self.name)

    def close(self) -> None:
        with contextlib.suppress(ChannelClosed, ChannelTimeout):
            self.channel.send({"do": "bye"}, 1.0)
        self.child.close()
