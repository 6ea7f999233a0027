"""Ranks of tensor-parallel engines as forks of the test's process, which has imported what takes a rank seconds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from fastkernels.engine.execution import worker


class Fork:
    """The part of subprocess.Popen that engine/execution/ranks.py uses, for its command `python -c MAIN FD FD`."""

    def __init__(self, command: list[str], pass_fds: tuple[int, int], env: dict[str, str], **_: Any):
        self.status: int | None = None
        self.lock = threading.Lock()  # the ranks' watcher asks, too, and only one may wait for a process
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(command[2:], pass_fds, env)
                worker.main()
            finally:
                os._exit(1)

    @staticmethod
    def _become(arguments: list[str], kept: tuple[int, int], env: dict[str, str]) -> None:
        gc.freeze()  # the end of an earlier group would wait for threads that only the parent has
        first = 3  # other ends of the sockets, which would keep them open
        for fd in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, fd)
            first = fd + 1
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = arguments

    def poll(self) -> int | None:
        with self.lock:
            if self.status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.status = os.waitstatus_to_exitcode(status) if pid else None
            return self.status

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
