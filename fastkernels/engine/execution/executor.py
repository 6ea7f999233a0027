"""Run steps on all ranks: the runner of this process, and with tensor parallelism those of worker processes.

Rank 0 is in this process. It sends each step to every worker, then launches it itself. Workers do not answer steps: all
ranks gather the same logits and draw the same noise, and so sample the same tokens. An error in any rank ends the
engine, because the ranks would be out of step.
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
from fastkernels.engine.execution.runner import Runner
from fastkernels.engine.execution.startup import Phases
from fastkernels.engine.execution.worker import Setup, build_runner, invoke, join, pack
from fastkernels.engine.runners import runner_class
from fastkernels.models.common import build, checks, weights

NOTICE = 2.0  # seconds to wait for the watcher to report a dead worker after a collective has failed


def make_executor(
    config: EngineConfig, folder: Path, hf_config: Any, phases: Phases | None = None
) -> Executor:
    """An executor whose ranks have loaded their models and allocated their caches. `phases`: of rank 0.

    Raises what Runner raises, ValueError for a model that cannot be sharded over the ranks, and WorkerDied.
    """
    if config.tensor_parallel_size == 1:
        with parallel.build_as(0, 1):
            return Executor(runner_class(hf_config, folder)(config, folder, hf_config, phases=phases))
    _check_ranks(config, folder, hf_config)
    return TensorParallelExecutor(config, folder, hf_config, phases or Phases())


class Executor:
    """Runs steps on the runner of this process.

    on_failure is called from another thread when a rank has died, even while no step runs. After that `check` raises.
    """

    on_failure: Callable[[], None] | None = None

    def __init__(self, runner: Runner):
        self.runner = runner

    def check(self) -> None:
        """Raise WorkerDied if a rank has died."""

    @property
    def lost_rank(self) -> int | None:
        """A rank whose process has ended, possibly before `check` knows the reason. Safe in any thread."""
        return None

    @property
    def limits(self) -> Any:
        return self.runner.limits

    @property
    def device(self) -> torch.device:
        return self.runner.device

    def launch(self, step: Any) -> Any:
        """Start a step on all ranks; see Runner.launch."""
        return self.runner.launch(step)

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run the runner's method `what`, or a module-level function what(runner, *args), on all ranks.

        Returns the results by rank. With tensor parallelism an exception ends the engine (WorkerDied), so a function
        that may fail must return its error.
        """
        return [invoke(self.runner, what, args)]

    def shutdown(self) -> None:
        """End the processes of other ranks. Safe to repeat."""


class TensorParallelExecutor(Executor):
    """Rank 0 in this process, the others in worker processes that end with this process or with the engine."""

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any, phases: Phases):
        if dist.is_initialized():
            raise ValueError(
                "this process is already in a torch.distributed group, and a tensor-parallel engine needs its own:"
                " shut down the other engine first, or use another process"
            )
        size = config.tensor_parallel_size
        cpu = (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        threads = max(1, torch.get_num_threads() // size) if cpu else None
        self._ready = False
        self._ranks = Ranks(torch.get_num_threads())
        self._end = weakref.finalize(self, self._ranks.close)
        this = weakref.ref(self)  # the watcher must not keep the engine alive

        def tell() -> None:
            executor = this()
            if executor is not None and executor.on_failure is not None:
                executor.on_failure()

        try:
            for rank in range(1, size):
                self._ranks.start(Setup(config, folder, hf_config, rank, threads))
            self._ranks.watch(tell)
            self.runner = self._ranks.runner = build_runner(
                Setup(config, folder, hf_config, 0, threads), phases
            )
            with self._together():
                for worker in self._ranks.workers:
                    worker.receive()  # it has loaded
            self.call(join, os.path.join(self._ranks.scratch.name, "rendezvous"))
            phases.mark("ranks")  # all ranks have loaded and joined the group
            self.call("choose_kernels")
            self.call("bind", min(self.call("num_fitting_blocks")))
        except BaseException:
            self.shutdown()
            raise
        self._ready = True

    def launch(self, step: Any) -> Any:
        with self._together():
            self._send(pack(step))
            return _Checked(self, self.runner.launch(step))

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        with self._together():
            self._send(pickle.dumps((what, args)))
            own = invoke(self.runner, what, args)
            return [own, *(worker.receive() for worker in self._ranks.workers)]

    @property
    def lost_rank(self) -> int | None:
        return self._ranks.lost_rank

    def check(self) -> None:
        if self._ranks.failure is not None:
            self.shutdown()
            raise self._ranks.failure

    def shutdown(self) -> None:
        self._end()

    def _send(self, data: bytes) -> None:
        for worker in self._ranks.workers:
            worker.commands.send_bytes(data)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Treat any failure inside as a failure of all ranks: end the engine and raise WorkerDied."""
        self.check()
        ranks = self._ranks
        if not ranks.workers:
            raise RuntimeError("this engine has been shut down")
        try:
            yield
        except BaseException as error:
            # A collective that lost a peer raises RuntimeError, a pipe OSError or EOFError, possibly before the watcher
            # notices. Other errors are rank 0's own.
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
        self.check()  # an aborted NCCL collective does not raise, but its result is garbage


class _Checked:
    """A step in flight on all ranks."""

    def __init__(self, executor: TensorParallelExecutor, own: Any):
        self._executor, self._own = executor, own

    def result(self) -> Any:
        with self._executor._together():
            return self._own.result()

    def sample(self, masks: Any) -> None:
        with self._executor._together():
            self._executor._send(pack(masks))
            self._own.sample(masks)


def _check_ranks(config: EngineConfig, folder: Path, hf_config: Any) -> None:
    """Raise ValueError before any process is started: too few GPUs, or sizes that cannot be sharded."""
    size, experts = config.tensor_parallel_size, config.expert_parallel_size
    gpus, model = torch.cuda.device_count(), config.model
    if config.device != "cpu" and 0 < gpus < size:
        raise ValueError(f"tensor_parallel_size {size} needs {size} GPUs, and there are {gpus}")
    try:
        checks.check_ranks(hf_config, size, experts)
        with parallel.build_as(0, size, experts):
            build.skeleton(folder, hf_config, torch.float32)
        draft = None if config.speculative_config is None else config.speculative_config.get("model")
        if draft is not None:
            model, folder = draft, weights.resolve(draft)
            with parallel.build_as(0, size, experts):
                build.skeleton(folder, build.load_config(folder), torch.float32)
    except ValueError as error:
        more = f" with expert_parallel_size {experts}" if experts > 1 else ""
        raise ValueError(f"tensor_parallel_size {size}{more} does not suit {model}: {error}") from error


__all__ = ["Executor", "TensorParallelExecutor", "WorkerDied", "make_executor"]
