"""The worker process of one rank: it runs what rank 0 sends until rank 0 ends.

main() gets the file descriptors of two sockets as arguments, and on another node than rank 0's the folders of the model
and of its draft model there. The first socket, `commands`, carries a Setup, then steps, which are not answered, and
calls, which are. The first process of a data-parallel rank answers COLLECT with the result of its oldest step; after
FORGET it has none. The second, `life`, closes when the other side ends, which ends the worker; a worker that fails
writes its error there as (one line, traceback).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fastkernels.engine.execution.forward.startup import Phases, keep_objects
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.steps.step import StepInput, StepOutput

log = logging.getLogger("fastkernels")


@dataclass(frozen=True)
class Setup:
    """The parameters of one rank. threads: PyTorch threads on the CPU, None on a GPU."""

    config: EngineConfig
    folder: Path
    hf_config: Any
    rank: int
    threads: int | None


def build_runner(setup: Setup, phases: Phases | None = None) -> Any:
    """This rank's Runner with its weights, not yet in a process group and without a KV cache."""
    import torch

    from fastkernels.engine.options.runners import runner_class

    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    config = setup.config
    with as_rank(config, setup.rank):
        return runner_class(setup.hf_config, setup.folder)(
            config, setup.folder, setup.hf_config, rank=setup.rank, bind_cache=False, phases=phases
        )


def as_rank(config: EngineConfig, rank: int) -> AbstractContextManager[None]:
    """The context in which the modules of a rank are built."""
    from fastkernels.core import parallel

    data_rank, place = divmod(rank, config.tensor_parallel_size)
    data = data_rank, config.data_parallel_size
    return parallel.build_as(place, config.tensor_parallel_size, config.expert_groups, data)


def join(runner: Any, rendezvous: str | tuple[str, int], interface: str | None = None) -> None:
    """Join the process group: NCCL on CUDA, gloo on the CPU.

    rendezvous  path of a file that does not exist yet; with several nodes, host and port of rank 0's store
    interface   with several nodes: of the network between them, if the node's variables do not name one; None: any

    On GPUs, ours is then measured against NCCL, and used for the messages for which it is faster. Data-parallel ranks
    form the groups of those that share experts.
    """
    from fastkernels.core import parallel
    from fastkernels.core.communicator import on_node
    from fastkernels.overrides.collective.measure import choose
    from fastkernels.overrides.expert_parallel.measure import choose_experts

    config = runner.config
    # NCCL's watchdog would end the process on an error; here the watcher of the workers aborts instead.
    alone = isinstance(rendezvous, str)
    reached = {"GLOO_SOCKET_IFNAME": "lo"} if alone else interfaces(interface)
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", **reached}
    with _environment(**variables), on_node(runner.rank // config.ranks_per_node):
        size, tensor, device = config.num_ranks, config.tensor_parallel_size, str(runner.device)
        where: Any = f"file://{rendezvous}" if isinstance(rendezvous, str) else _store(*rendezvous)
        if config.data_parallel_size > 1:
            sharing = parallel.init_sharing(runner.rank, size, where, device, tensor=tensor)
            limits = choose_experts(sharing) if runner.shares_experts else {}
            if limits and not runner.rank:
                said = ", ".join(f"{op} up to {most >> 10} KiB" for op, most in limits.items())
                log.info("tokens to experts: our kernels are faster and are used: %s", said)
        else:
            parallel.init(runner.rank, size, where, device)
    most = choose(parallel.communicator(parallel.TP)) if tensor > 1 else -1
    if most > 0 and not runner.rank:
        log.info("all-reduce: ours is faster than NCCL up to %d KiB, and is used", most >> 10)


def interfaces(name: str | None) -> dict[str, str]:
    """The variables with which gloo and NCCL use this network interface."""
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def _store(host: str, port: int) -> Any:
    """A client of rank 0's store."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False)


COLLECT, FORGET = "collect", "forget"
ARRAYS = (
    "slots", "query_lens", "seq_lens", "offsets", "input_ids", "block_updates", "state_loads", "state_saves",
)  # fmt: skip


def pack(step: Any) -> bytes:
    """Serialize a step, the masks of the last one, COLLECT or FORGET.

    Arrays of a StepInput go as bytes: 5 us for 256 rows instead of 41 us (Xeon, 2026-11).
    """
    if not isinstance(step, StepInput):
        return pickle.dumps((step,), protocol=5)
    arrays = [(a.dtype.char, a.tobytes()) for a in (getattr(step, name) for name in ARRAYS)]
    more = (
        step.num_decodes,
        step.new_rows,
        step.prompt_targets,
        step.masked,
        step.media,
        step.sources,
        step.drafts,
        step.next_drafts,
        step.together,
    )
    return pickle.dumps((arrays, *more), protocol=5)


def unpack(data: tuple[Any, ...]) -> Any:
    """The object that `pack` serialized, from its unpickled form."""
    if len(data) == 1:
        return data[0]
    arrays, num_decodes, new_rows, prompt_targets, masked, media, sources, drafts, nexts, together = data
    slots, query_lens, seq_lens, offsets, input_ids, updates, loads, saves = (
        np.frombuffer(raw, kind) for kind, raw in arrays
    )
    return StepInput(
        slots, query_lens, seq_lens, offsets, input_ids, num_decodes, updates.reshape(-1, 3), new_rows, prompt_targets,
        masked, loads.reshape(-1, 2), saves.reshape(-1, 2), media, sources,
        drafts, nexts, together,
    )  # fmt: skip


def invoke(runner: Any, what: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the runner's method of that name, or a function with the runner as first argument."""
    with runner.scope:
        return getattr(runner, what)(*args) if isinstance(what, str) else what(runner, *args)


def launch(runner: Any, step: Any) -> Any:
    """Start a step; see Runner.launch."""
    with runner.scope:
        return runner.launch(step)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables that are not set yet, inside the context."""
    added = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def on_this_node(setup: Setup, model: str, draft: str = "") -> Setup:
    """The setup of rank 0 with this node's folders of the model and of its draft model."""
    config = replace(setup.config, model=model)
    if draft:
        config = replace(config, speculative_config={**(config.speculative_config or {}), "model": draft})
    return replace(setup, folder=Path(model), config=config)


def _serve(commands: Connection, *folders: str) -> None:
    setup: Setup = pickle.loads(commands.recv_bytes())
    if folders:
        setup = on_this_node(setup, *folders)
    runner = build_runner(setup)
    keep_objects()
    commands.send(None)
    pending: deque[Any] = deque(maxlen=min(setup.config.data_parallel_size, 2))  # others do not collect
    while True:
        command = pickle.loads(commands.recv_bytes())
        if len(command) == 2:
            commands.send(invoke(runner, *command))
            continue
        received = unpack(command)
        if isinstance(received, TokenMasks):
            pending[-1].sample(received)
        elif received == COLLECT:
            commands.send(_whole(pending.popleft().result()))
        elif received == FORGET:
            pending.clear()
        else:
            pending.append(launch(runner, received))


def _whole(output: StepOutput) -> StepOutput:
    """The output with its drafts, for another process. Waits for them."""
    if output.next_drafts is None:
        return output
    return replace(output, next_drafts=partial(np.asarray, output.next_drafts()))


def _end_with_parent(life: Connection, parent: int) -> None:
    # The main thread may hang in a collective. A process forked by the parent may keep the other end open.
    while not life.poll(2.0) and os.getppid() == parent:
        pass
    os._exit(0)


def main() -> None:
    commands, life = (Connection(int(fd)) for fd in sys.argv[1:3])
    # Signals to the process group (Ctrl-C, a service manager) are handled by rank 0, which may finish its requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("fastkernels").setLevel(logging.ERROR)  # rank 0 logs the same
    threading.Thread(target=_end_with_parent, args=(life, os.getppid()), daemon=True).start()
    try:
        _serve(commands, *sys.argv[3:5])
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 has closed the socket
    except BaseException as error:
        reason = "".join(traceback.format_exception_only(type(error), error)).splitlines()[0]
        life.send((reason, traceback.format_exc()))
        os._exit(1)  # no cleanup: the process group would wait for its peers
