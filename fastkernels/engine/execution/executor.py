"""Who runs the steps: the model of this process, or with tensor parallelism this one and those of worker processes.

Rank 0 is in this process. It sends each StepInput to every worker before it launches it itself; workers do not answer:
all ranks gather the same logits, draw the same noise, and so sample the same tokens. Whatever goes wrong in one rank
ends the engine: the ranks would be out of step.
"""

from __future__ import annotations

import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.execution.ranks import Ranks, WorkerDied
from fastkernels.engine.execution.runner import ModelRunner
from fastkernels.engine.execution.startup import Phases
from fastkernels.engine.execution.step import Pending, StepInput, StepOutput
from fastkernels.engine.execution.worker import Setup, build_runner, encode, invoke, join
from fastkernels.models.common import build

NOTICE = 2.0  # seconds that the watcher gets to see a worker's death after a collective has failed


def make_executor(
    config: EngineConfig, folder: Path, hf_config: Any, phases: Phases | None = None
) -> Executor:
    """The ranks that config asks for, loaded, with their KV caches, ready to run steps. `phases`: of rank 0.

    Raises what building the model raises, ValueError for a model that the ranks cannot share, and WorkerDied.
    """
    if config.tensor_parallel_size == 1:
        with parallel.build_as(0, 1):
            return Executor(ModelRunner(config, folder, hf_config, phases=phases))
    _check_ranks(config, folder, hf_config)
    return TensorParallelExecutor(config, folder, hf_config, phases or Phases())


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

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any, phases: Phases):
        if dist.is_initialized():
            raise ValueError(
                "this process is in a torch.distributed group already, and a tensor-parallel engine needs its own:"
                " shut the other engine down first, or use another process"
            )
        size = config.tensor_parallel_size
        cpu = (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        threads = max(1, torch.get_num_threads() // size) if cpu else None
        self._ready = False
        self._ranks = Ranks(torch.get_num_threads())
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
            self.runner = build_runner(Setup(config, folder, hf_config, 0, threads), phases)
            with self._together():
                for worker in self._ranks.workers:
                    worker.receive()  # it has loaded
            self.call(join, os.path.join(self._ranks.scratch.name, "rendezvous"))
            phases.mark("ranks")  # the last of them has loaded, and all have met
            self.call("bind", min(self.call("num_fitting_blocks")))
        except BaseException:
            self.shutdown()
            raise
        self._ready = True

    def launch(self, step: StepInput) -> Pending:
        with self._together():
            self._send(encode(step))
            return _Checked(self, self.runner.launch(step))

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        with self._together():
            self._send(pickle.dumps((what, args)))
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

    def _send(self, data: bytes) -> None:
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


__all__ = ["Executor", "TensorParallelExecutor", "WorkerDied", "make_executor"]
