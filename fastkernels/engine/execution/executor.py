"""Run steps on all ranks: the runner of this process, and those of worker processes here and on other nodes.

Rank 0 is in this process. It sends each step to every worker, then launches it itself. With tensor parallelism workers
do not answer steps: all ranks gather the same logits and draw the same noise, and so sample the same tokens. An error
in any rank ends the engine, because the ranks would be out of step. Data-parallel ranks have steps of their own.
"""

from __future__ import annotations

import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.engine.execution import follow, nodes
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.forward.startup import Phases
from fastkernels.engine.execution.ranks import Ranks, Worker, WorkerDied
from fastkernels.engine.execution.worker import (
    COLLECT,
    FORGET,
    Setup,
    as_rank,
    build_runner,
    invoke,
    join,
    launch,
    pack,
)
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.runners import runner_class
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.steps.step import StepInput, StepOutput
from fastkernels.engine.steps.together import idle_step, step_together
from fastkernels.models.common.checkpoints import weights
from fastkernels.models.common.configs import checks
from fastkernels.models.common.plans import build

NO_MASKS = TokenMasks(np.empty(0, np.int64), np.empty((0, 0), np.int32))
NOTICE = 2.0  # seconds to wait for the watcher to report a dead worker after a collective has failed


def make_executor(
    config: EngineConfig, folder: Path, hf_config: Any, phases: Phases | None = None
) -> Executor:
    """An executor whose ranks have loaded their models and allocated their caches. `phases`: of rank 0.

    Raises what Runner raises, ValueError for a model that cannot be sharded over the ranks, and WorkerDied.
    """
    if config.num_ranks == 1:
        with parallel.build_as(0, 1):
            return Executor(runner_class(hf_config, folder)(config, folder, hf_config, phases=phases))
    _check_ranks(config, folder, hf_config)
    kind = DataParallelExecutor if config.data_parallel_size > 1 else TensorParallelExecutor
    return kind(config, folder, hf_config, phases or Phases())


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
        return launch(self.runner, step)

    def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run the runner's method `what`, or a module-level function what(runner, *args), on all ranks.

        Returns the results by rank. With tensor parallelism an exception ends the engine (WorkerDied), so a function
        that may fail must return its error.
        """
        return [invoke(self.runner, what, args)]

    def shutdown(self) -> None:
        """End the processes of other ranks. Safe to repeat."""


class TensorParallelExecutor(Executor):
    """Rank 0 in this process, the others in worker processes that end with this process or with the engine.

    With several nodes those of the other nodes are started there: see nodes.py.
    """

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any, phases: Phases):
        if dist.is_initialized():
            raise ValueError(
                "this process is already in a torch.distributed group, and an engine of several ranks needs its own:"
                " shut down the other engine first, or use another process"
            )
        cpu = (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
        threads = max(1, torch.get_num_threads() // config.ranks_per_node) if cpu else None
        self._ready = False
        self._ranks = Ranks(torch.get_num_threads())
        self._end = weakref.finalize(self, self._ranks.close)
        this = weakref.ref(self)  # the watcher must not keep the engine alive

        def tell() -> None:
            executor = this()
            if executor is not None and executor.on_failure is not None:
                executor.on_failure()

        try:
            made = Setup(config, folder, hf_config, 0, threads)
            self._start(made)
            self._ranks.watch(tell)
            self.runner = self._ranks.runner = build_runner(made, phases)
            with self._together():
                for worker in self._ranks.workers:
                    worker.receive()  # it has loaded
            self._join()
            phases.mark("ranks")  # all ranks have loaded and joined the group
            self.call("choose_kernels")
            self.call("bind", min(self.call("num_fitting_blocks")))
        except BaseException as error:
            self._ranks.tell_nodes(nodes.described(error))
            self.shutdown()
            raise
        self._ready = True

    def _start(self, setup: Setup) -> None:
        """Start the workers of this node, and wait for those of the others."""
        config = setup.config
        gathering = nodes.Gathering.of(config) if config.nnodes > 1 else None
        try:
            for rank in range(1, config.ranks_per_node):
                self._ranks.start(replace(setup, rank=rank))
            if gathering is not None:
                self._address = gathering.address
                for worker in gathering.workers(follow.about(config, setup.folder)):
                    worker.begin(replace(setup, rank=worker.rank))
                    self._ranks.workers.append(worker)
                self._ranks.nodes = list(gathering.nodes.values())
        except BaseException as error:
            if gathering is not None:
                gathering.cancel(error)
            raise
        finally:
            if gathering is not None:
                gathering.close()

    def _join(self) -> None:
        """Join the process group in all ranks."""
        if not self._ranks.nodes:
            self.call(join, os.path.join(self._ranks.scratch.name, "rendezvous"))
            return
        with nodes.free_port(self._address) as sock:
            port: int = sock.getsockname()[1]
            self._ranks.store = dist.TCPStore(
                self._address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(sock.fileno()),
            )
        self.call(join, (self._address, port), nodes.interface_of(self._address))

    def launch(self, step: Any) -> Any:
        with self._together():
            self._send(pack(step))
            return _Checked(self, launch(self.runner, step))

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
            ranks.kill(nodes.described(error))
            self.shutdown()
            if not self._ready or not isinstance(error, Exception):
                raise
            ranks.failure = WorkerDied(0, f"failed: {type(error).__name__}: {error}", trace)
            raise ranks.failure from ranks.failure.__cause__
        self.check()  # an aborted NCCL collective does not raise, but its result is garbage


class DataParallelExecutor(TensorParallelExecutor):
    """The same processes, each with steps of its own. Ranks that share experts step together."""

    def __init__(self, config: EngineConfig, folder: Path, hf_config: Any, phases: Phases):
        super().__init__(config, folder, hf_config, phases)
        self.shares_experts: bool = self.runner.shares_experts
        self._data, self._tensor = config.data_parallel_size, config.tensor_parallel_size
        self._idle = idle_step(config.max_num_seqs)

    def launch(self, step: Any) -> Any:
        """Start the same step on each rank; the result is that of the first one."""
        return _First(self.launch_each([step] * self._data))

    def launch_each(self, steps: Sequence[StepInput | None]) -> Round:
        """Start a step on each rank, by rank; None: it has no requests. At least one has some."""
        made: Sequence[StepInput | None] = steps
        if self.shares_experts:
            made = step_together(steps, self._idle)
        with self._together():
            for rank, step in enumerate(made):
                if step is not None:
                    self._send_to(rank, pack(step))
            own = None if made[0] is None else launch(self.runner, made[0])
        there = {rank: step.masked for rank, step in enumerate(made) if step is not None}
        return Round(self, own, there)

    def first_worker(self, rank: int) -> Worker:
        """The first process of a data-parallel rank from 1 on, which answers for it."""
        return self._ranks.workers[rank * self._tensor - 1]

    def _send_to(self, rank: int, data: bytes) -> None:
        """Send to the workers of a data-parallel rank. The first one of rank 0 is this process."""
        first = rank * self._tensor
        for worker in self._ranks.workers[max(first - 1, 0) : first + self._tensor - 1]:
            worker.commands.send_bytes(data)

    def forget(self) -> None:
        """Drop the results of rounds that are not collected. Without workers there are none."""
        if self._ranks.workers:
            with self._together():
                self._send(pack(FORGET))


class Round:
    """A step in flight on data-parallel ranks, of this process and of workers. masked: by rank."""

    def __init__(self, executor: DataParallelExecutor, own: Any, masked: dict[int, bool]):
        self._executor, self._own, self._masked = executor, own, masked

    def sample(self, masks: Mapping[int, TokenMasks]) -> None:
        """Sample the tokens of masked steps, by rank; see Pending. Ranks that have no masks wait for the others."""
        with self._executor._together():
            found = {rank: masks.get(rank, NO_MASKS) for rank, masked in self._masked.items() if masked}
            for rank, own in found.items():
                self._executor._send_to(rank, pack(own))
            if 0 in found:  # behind the others, which it may wait for
                self._own.sample(found[0])

    def results(self) -> dict[int, StepOutput]:
        """Wait for the ranks. Rounds are collected in the order of their launches."""
        executor = self._executor
        with executor._together():
            workers = {rank: executor.first_worker(rank) for rank in self._masked if rank}
            for worker in workers.values():
                worker.commands.send_bytes(pack(COLLECT))
            found = {} if self._own is None else {0: self._own.result()}
            return found | {rank: worker.receive() for rank, worker in workers.items()}


class _First:
    """The same step in flight on all data-parallel ranks."""

    def __init__(self, made: Round):
        self._made = made

    def result(self) -> StepOutput:
        return self._made.results()[0]


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
    size, experts = config.ranks_per_node, config.expert_parallel_size
    gpus, model = torch.cuda.device_count(), config.model
    name = _sizes(config)
    if config.device != "cpu" and 0 < gpus < size:
        here = " on each node" if config.nnodes > 1 else ""
        raise ValueError(f"{name} needs {size} GPUs{here}, and there are {gpus}")
    try:
        checks.check_ranks(hf_config, config.tensor_parallel_size, config.expert_groups)
        with as_rank(config, 0):
            build.skeleton(folder, hf_config, torch.float32)
        draft = None if config.speculative_config is None else config.speculative_config.get("model")
        if draft is not None:
            model, folder = draft, weights.resolve(draft)
            with as_rank(config, 0):
                build.skeleton(folder, build.load_config(folder), torch.float32)
    except ValueError as error:
        more = f" with expert_parallel_size {experts}" if experts > 1 else ""
        raise ValueError(f"{name}{more} does not suit {model}: {error}") from error


def _sizes(config: EngineConfig) -> str:
    """The options that make several ranks, for messages."""
    names = [name for name in ("data_parallel_size", "tensor_parallel_size") if getattr(config, name) > 1]
    return " and ".join(f"{name} {getattr(config, name)}" for name in names)


__all__ = ["DataParallelExecutor", "Executor", "TensorParallelExecutor", "WorkerDied", "make_executor"]
