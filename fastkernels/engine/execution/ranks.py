"""The worker processes of an engine of several ranks: start, supervision and end."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.engine.execution.worker import Setup

MAIN = "from fastkernels.engine.execution.worker import main; main()"
GRACE = 5.0  # seconds for an idle worker to end by itself
RELEASE_S = 1e-3  # between releases of kernels that wait for a dead rank: a step has about a hundred


class WorkerTraceback(Exception):
    """The traceback of another process, shown as the cause of a WorkerDied."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerDied(RuntimeError):
    """A rank of an engine ended or failed in a step, and the engine ended with it.

    traceback is text, empty if the process was killed. The message is one line.
    """

    fatal = True

    def __init__(self, rank: int, reason: str, trace: str = ""):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.traceback = rank, trace
        if trace:
            self.__cause__ = WorkerTraceback(trace)


class Worker(ABC):
    """The process of a rank, and this process's ends of its two connections (see worker.py)."""

    rank: int
    commands: Connection
    life: Connection

    def receive(self) -> Any:
        """Wait for the result of a call. Raises EOFError if the worker ends instead."""
        return self.commands.recv()

    def death(self) -> WorkerDied:
        """The reason of its end. Call it when `life` is readable or closed."""
        try:
            reason, trace = self.life.recv()
        except (EOFError, OSError):
            reason = trace = ""
        return self._ended(reason, trace)

    @abstractmethod
    def _ended(self, reason: str, trace: str) -> WorkerDied:
        """Wait for its end. reason, trace: what it wrote, empty if it was killed."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it has ended. Does not wait; safe in any thread."""

    @abstractmethod
    def kill(self) -> None:
        """End it, even if it is stuck in a collective."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended, after `commands` was closed; kill it if it does not."""


class LocalWorker(Worker):
    """A worker that this process starts, on its machine."""

    def __init__(self, setup: Setup):
        self.rank = setup.rank
        (ours, theirs), (life, their_life) = socket.socketpair(), socket.socketpair()
        self.process = start((theirs.fileno(), their_life.fileno()), setup.threads)
        theirs.close()
        their_life.close()
        self.commands, self.life = Connection(ours.detach()), Connection(life.detach())
        self.commands.send_bytes(pickle.dumps(setup))

    def _ended(self, reason: str, trace: str) -> WorkerDied:
        code = ended(self.process)
        if trace:
            return WorkerDied(self.rank, f"failed: {reason}", trace)
        return WorkerDied(self.rank, f"(pid {self.process.pid}) {how_ended(code)}")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        ended(self.process)


def start(
    fds: tuple[int, int], threads: int | None, *more: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a worker with the file descriptors of its connections. more: arguments of worker.main."""
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    if threads is not None:
        made["OMP_NUM_THREADS"] = str(threads)
    # Not multiprocessing, so that user scripts need no `if __name__ == "__main__"`.
    command = [sys.executable, "-c", MAIN, *map(str, fds), *more]
    return subprocess.Popen(command, pass_fds=fds, env=made, stdin=subprocess.DEVNULL)


def ended(process: subprocess.Popen[bytes]) -> int:
    """The status of a process that should end by itself; it is killed if it does not."""
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def how_ended(code: int) -> str:
    """The status of a process in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class Node(Protocol):
    """Another machine of the engine; see nodes.py."""

    def end(self, reason: str = "") -> None:
        """Tell it to end its ranks, and why. Only the first call counts; safe in any thread."""

    def close(self) -> None:
        """Wait until it has ended them."""


class Ranks:
    """The workers, and the thread that watches them. Holds no reference to the executor, which can be collected."""

    def __init__(self, threads: int):
        self.workers: list[Worker] = []
        self.nodes: Sequence[Node] = ()  # the others, if there are several
        self.failure: WorkerDied | None = None
        self.failed = threading.Event()
        # A process group reads its rendezvous file for its whole life.
        self.scratch = tempfile.TemporaryDirectory(prefix="fastkernels-")
        self.store: dist.TCPStore | None = None  # with several nodes, instead of such a file
        self._threads = threads  # of this process, to be restored
        self._closing = False
        self._watcher: threading.Thread | None = None
        self.runner: Any = None  # of rank 0

    @property
    def lost_rank(self) -> int | None:
        """A rank whose process has ended. Asks the kernel, so it does not wait for the watcher."""
        if self.failure is not None:
            return self.failure.rank
        return next((w.rank for w in self.workers if w.has_ended), None)

    def start(self, setup: Setup) -> None:
        self.workers.append(LocalWorker(setup))

    def watch(self, tell: Callable[[], None]) -> None:
        """Start watching the workers; call `tell` when the first one dies."""
        self._watcher = threading.Thread(
            target=self._watch, args=(tell,), name="fastkernels-watch", daemon=True
        )
        self._watcher.start()

    def _watch(self, tell: Callable[[], None]) -> None:
        alive: dict[Any, Worker] = {worker.life: worker for worker in self.workers}
        while alive:
            for life in wait(list(alive)):
                worker = alive.pop(life)
                death = None if self._closing else worker.death()
                life.close()  # type: ignore[union-attr]
                if death is not None and not self._closing:
                    self._closing, self.failure = True, death
                    self.kill(str(death))
                    self.failed.set()
                    _leave_collectives()
                    tell()

    def kill(self, reason: str) -> None:
        """Kill the workers, which may be stuck in a collective. gloo collectives in rank 0 then fail."""
        self._closing = True
        self.tell_nodes(reason)
        for worker in self.workers:
            worker.kill()

    def tell_nodes(self, reason: str) -> None:
        """Tell the other nodes why the engine ends."""
        for node in self.nodes:
            node.end(reason)

    def close(self) -> None:
        """End the workers, and leave the process group."""
        self._closing = True
        self.tell_nodes("" if self.failure is None else str(self.failure))
        for worker in self.workers:
            worker.commands.close()  # an idle worker ends on this
        for worker in self.workers:
            worker.wait()
        for node in self.nodes:
            node.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(GRACE)
        if self.runner is not None:  # its graphs hold the NCCL communicator: with them its end would hang
            self.runner.graphs = self.runner.draft_graphs = None
            self.runner = None
        if self.workers and dist.is_initialized():
            _abort_nccl()  # the peers are gone: an orderly end is impossible
            dist.destroy_process_group()
        parallel.reset()
        torch.set_num_threads(self._threads)
        self.scratch.cleanup()
        self.store = None
        self.workers, self.nodes = [], ()


def _leave_collectives() -> None:
    """End all waits of this GPU for a rank that has died: in NCCL's kernels, and in ours."""
    ended = threading.Event()

    def release() -> None:
        while True:
            parallel.release()
            if ended.wait(RELEASE_S):
                return

    if dist.is_initialized() and dist.get_backend() == "nccl":
        device = torch.cuda.current_device()
        releasing = threading.Thread(target=release, name="fastkernels-release", daemon=True)
        releasing.start()
        _abort_nccl()
        torch.cuda.synchronize(device)
        ended.set()
        releasing.join()


def _abort_nccl() -> None:
    """Abort NCCL collectives in this process, also those in a CUDA graph. Safe in any thread."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    default = dist.distributed_c10d._get_default_group()
    others = [group for group in dist.distributed_c10d._world.pg_names if group is not default]
    if not others:
        default.abort()
        return
    backend: Any = default._get_backend(torch.device("cuda"))
    backend._group_start()  # otherwise the end of one may wait for that of another
    for group in (*reversed(others), default):
        group.abort()
    backend._group_end()
