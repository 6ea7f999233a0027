"""Who runs the steps: the model of this process, or with tensor parallelism this one and those of worker processes.

Rank 0 is in this process. It sends each StepInput to every worker before it launches it itself; workers do not answer:
all ranks gather the same logits, draw the same noise, and so sample the same tokens. Whatever goes wrong in one rank
ends the engine: the ranks would be out of step.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastkernels import parallel
from fastkernels.models import build

from .config import EngineConfig
from .runner import ModelRunner
from .step import Pending, StepInput, StepOutput
from .worker import Setup, build_runner, invoke, join

MAIN = "from fastkernels.engine.worker import main; main()"
GRACE = 5.0  # seconds that an idle worker gets to end by itself
NOTICE = 2.0  # seconds that the watcher gets to see a worker's death after a collective has failed


class WorkerTraceback(Exception):
    """The traceback of another process, shown as the cause of a WorkerDied."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerDied(RuntimeError):
    """A rank of a tensor-parallel engine has ended, or failed in a step; the engine has ended with it.

    rank, traceback (text; empty if the process was killed). The message is one line.
    """

    fatal = True

    def __init__(self, rank: int, reason: str, trace: str = ""):
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.traceback = rank, trace
        if trace:
            self.__cause__ = WorkerTraceback(trace)


def make_executor(config: EngineConfig, folder: Path, hf_config: Any) -> Executor:
    """The ranks that config asks for, loaded, with their KV caches, ready to run steps.

    Raises what building the model raises, ValueError for a model that the ranks cannot share, and WorkerDied.
    """
    if config.tensor_parallel_size == 1:
        with parallel.build_as(0, 1):
            return Executor(ModelRunner(config, folder, hf_config))
    _check_ranks(config, folder, hf_config)
    return TensorParallelExecutor(config, folder, hf_config)


class Executor:
    """The runner of this process (step.Executor).

    on_failure is called, in another thread, when a rank has died, also while there is nothing to run: `check` raises
    then.
    """

    on_failure: Callable[[], None] | None = None

    def __init__(self, runner: ModelRunner):
        self.runner = runner

    def check(self) -> None:
        """Raises WorkerDied if a rank has."""

    @property
    def limits(self) -> Any:
        return self.runner.limits

    @property
    def device(self) -> torch.device:
        return self.runner.device

    def launch(self, step: StepInput) -> Pending:
        """Start a step on all ranks."""
        return self.runner.launch(step)

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run the runner's method `what`, or a module's function what(runner, *args), on all ranks; results by rank.

        With tensor parallelism an exception in it ends the engine (WorkerDied): return what may fail.
        """
        return [invoke(self.runner, what, args)]

    def shutdown(self) -> None:
        """End the processes of other ranks. A second call does nothing."""


class TensorParallelExecutor(Executor):
    """Rank 0 here, the others in processes that end with this one, with the engine, or when it is collected."""

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any):
        if dist.is_initialized():
            raise ValueError(
                "this process is in a torch.distributed group already, and a tensor-parallel engine needs its own:"
                " shut the other engine down first, or use another process"
            )
        size = config.tensor_parallel_size
        cpu = (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        threads = max(1, torch.get_num_threads() // size) if cpu else None
        self._ready = False
        self._ranks = _Ranks(torch.get_num_threads())
        self._end = weakref.finalize(self, self._ranks.close)
        this = weakref.ref(self)  # the watcher does not keep the engine

        def tell() -> None:
            executor = this()
            if executor is not None and executor.on_failure is not None:
                executor.on_failure()

        try:
            for rank in range(1, size):
                self._ranks.start(Setup(config, folder, hf_config, rank, threads))
            self._ranks.watch(tell)
            self.runner = build_runner(Setup(config, folder, hf_config, 0, threads))
            with self._together():
                for worker in self._ranks.workers:
                    worker.receive()  # it has loaded
            self.call(join, os.path.join(self._ranks.scratch.name, "rendezvous"))
            self.call("bind", min(self.call("num_fitting_blocks")))
        except BaseException:
            self.shutdown()
            raise
        self._ready = True

    def launch(self, step: StepInput) -> Pending:
        with self._together():
            self._send(step)
            return _Checked(self, self.runner.launch(step))

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        with self._together():
            self._send((what, args))
            own = invoke(self.runner, what, args)
            return [own, *(worker.receive() for worker in self._ranks.workers)]

    def check(self) -> None:
        if self._ranks.failure is not None:
            self.shutdown()
            raise self._ranks.failure

    def shutdown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.graphs = None  # graphs hold NCCL's communicator
        self._end()

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=5)
        for worker in self._ranks.workers:
            worker.commands.send_bytes(data)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What fails inside has failed on all ranks: raises WorkerDied, and the engine is at its end."""
        self.check()
        ranks = self._ranks
        if not ranks.workers:
            raise RuntimeError("this engine has been shut down")
        try:
            yield
        except BaseException as error:
            # A collective that lost a peer raises RuntimeError, a pipe OSError or EOFError, maybe before the watcher
            # has seen the death. All else is rank 0's own.
            if isinstance(error, (RuntimeError, OSError, EOFError)) and ranks.failed.wait(NOTICE):
                assert ranks.failure is not None
                self.shutdown()
                raise ranks.failure from ranks.failure.__cause__
            trace = traceback.format_exc()
            ranks.kill()
            self.shutdown()
            if not self._ready or not isinstance(error, Exception):
                raise
            ranks.failure = WorkerDied(0, f"failed: {type(error).__name__}: {error}", trace)
            raise ranks.failure from ranks.failure.__cause__
        self.check()  # an aborted NCCL collective raises nothing, and its result is no result


class _Checked:
    """A step of all ranks under way."""

    def __init__(self, executor: TensorParallelExecutor, own: Pending):
        self._executor, self._own = executor, own

    def result(self) -> StepOutput:
        with self._executor._together():
            return self._own.result()


class _Worker:
    """The process of one rank, and our ends of its two socket pairs (see worker.py)."""

    def __init__(self, setup: Setup):
        self.rank = setup.rank
        (ours, theirs), (life, their_life) = socket.socketpair(), socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if setup.threads is not None:
            environment["OMP_NUM_THREADS"] = str(setup.threads)
        fds = theirs.fileno(), their_life.fileno()
        # Not multiprocessing: a script that makes an LLM needs no `if __name__ == "__main__"` this way.
        command = [sys.executable, "-c", MAIN, *map(str, fds)]
        self.process = subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        their_life.close()
        self.commands, self.life = Connection(ours.detach()), Connection(life.detach())
        self.commands.send_bytes(pickle.dumps(setup))

    def receive(self) -> Any:
        """The answer to a call. Raises EOFError if the worker ends instead."""
        return self.commands.recv()

    def death(self) -> WorkerDied:
        """Why it ended; to be called when its end of `life` has something to say, or is closed."""
        try:
            trace = self.life.recv_bytes().decode()
        except (EOFError, OSError):
            trace = ""
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if trace:
            return WorkerDied(self.rank, f"failed: {trace.strip().splitlines()[-1]}", trace)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return WorkerDied(self.rank, f"(pid {self.process.pid}) {how}")


class _Ranks:
    """The workers, and the thread that watches them. Knows nothing of the executor, so that that can be collected."""

    def __init__(self, threads: int):
        self.workers: list[_Worker] = []
        self.failure: WorkerDied | None = None
        self.failed = threading.Event()
        self.scratch = tempfile.TemporaryDirectory(prefix="fastkernels-")  # of the rendezvous, as long as the group
        self._threads = threads  # of this process before
        self._closing = False
        self._watcher: threading.Thread | None = None

    def start(self, setup: Setup) -> None:
        self.workers.append(_Worker(setup))

    def watch(self, tell: Callable[[], None]) -> None:
        """Wait for deaths from now on, and tell of the first."""
        self._watcher = threading.Thread(
            target=self._watch, args=(tell,), name="fastkernels-watch", daemon=True
        )
        self._watcher.start()

    def _watch(self, tell: Callable[[], None]) -> None:
        alive: dict[Any, _Worker] = {worker.life: worker for worker in self.workers}
        while alive:
            for life in wait(list(alive)):
                death = alive.pop(life).death()
                life.close()  # type: ignore[union-attr]
                if not self._closing:
                    self._closing, self.failure = True, death
                    self.kill()
                    self.failed.set()
                    _abort_nccl()
                    tell()

    def kill(self) -> None:
        """End the workers at once: out of step, or in a collective that never ends. gloo's fail at this in rank 0."""
        self._closing = True
        for worker in self.workers:
            worker.process.kill()

    def close(self) -> None:
        """End the workers, and leave the process group."""
        self._closing = True
        for worker in self.workers:
            worker.commands.close()  # idle, it ends at this
        for worker in self.workers:
            try:
                worker.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(GRACE)
        if self.workers and dist.is_initialized():
            _abort_nccl()  # its peers are gone: there is nobody to agree with on an end
            dist.destroy_process_group()
        parallel.reset()
        torch.set_num_threads(self._threads)
        self.scratch.cleanup()
        self.workers = []


def _abort_nccl() -> None:
    """End the NCCL collectives under way in this process, also those in a CUDA graph; any thread may call it."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._get_default_group().abort()


def _check_ranks(config: EngineConfig, folder: Path, hf_config: Any) -> None:
    """Raises ValueError before any process is started: too few GPUs, or sizes that so many ranks cannot share."""
    size = config.tensor_parallel_size
    gpus = torch.cuda.device_count()
    if config.device != "cpu" and 0 < gpus < size:
        raise ValueError(f"tensor_parallel_size {size} needs as many GPUs, and there are {gpus}")
    try:
        with parallel.build_as(0, size):
            build.skeleton(folder, hf_config, torch.float32)
    except ValueError as error:
        raise ValueError(f"tensor_parallel_size {size} does not suit {config.model}: {error}") from error
