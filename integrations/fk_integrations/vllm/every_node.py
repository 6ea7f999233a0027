"""Requests to the workers of a vLLM engine on several machines. Each rank answers, also one without FastKernels.

They go through the engine core, whose process may send functions to workers: a missing method is an error of the whole
call in vLLM, without the rank, and leaves the answers of other ranks for the next call.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any

from fk_integrations.core.nodes import node

CORE, FRONT_END = "vllm.v1.engine.core", "vllm.engine.arg_utils"
NAME = "fastkernels_every_node"
LIMIT_S = 1800.0  # graphs may be captured again
LOOKS_S = 1.0  # between two looks at vLLM's executor
NOTICED_WITHIN_S = 30.0  # Ray notices the death of a worker at once, and that of its node seconds later
MISSING = "FastKernels is not installed here, or VLLM_PLUGINS leaves it out"


class WorkerLost(RuntimeError):
    """A worker cannot answer any more."""


def several(parallel: Any) -> bool:
    """Whether a vllm.config.ParallelConfig may place workers on other machines."""
    return bool(parallel.use_ray) or parallel.nnodes > 1


def ask(node: Callable[[], str], missing: str, worker: Any, request: str) -> str:
    """In a worker: its reply. Sent by value: it needs only Python there."""
    import json
    import os

    rpc = getattr(worker, "fastkernels_rpc", None)
    if rpc is not None:
        return str(rpc(request))
    parallel = worker.vllm_config.parallel_config
    rank = worker.rank + getattr(parallel, "data_parallel_index", 0) * parallel.world_size
    place = {"rank": rank, "pid": os.getpid(), "node": node()}
    return json.dumps({**place, "host": "vllm", "version": None, "rows": [], "error": missing})


def every_node(core: Any, request: str) -> list[str]:
    """EngineCore.fastkernels_every_node: the replies of all workers. Raises WorkerLost with the ranks lost."""
    import cloudpickle

    for module in ("fk_integrations.core.nodes", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    executor = core.model_executor
    try:
        return _answered(
            executor, partial(executor.collective_rpc, partial(ask, node, MISSING), args=(request,))
        )
    except Exception as error:
        if not getattr(executor, "is_failed", False):
            raise
        raise WorkerLost(f"{error}{_lost(executor)}") from error


def _answered(executor: Any, send: Callable[[], list[str]]) -> list[str]:
    """Return `send()`, which may wait for a dead machine without end. Raises WorkerLost once vLLM notices."""
    answer: Future[list[str]] = Future()

    def run() -> None:
        try:
            answer.set_result(send())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name="fastkernels-every-node", daemon=True).start()
    until = time.monotonic() + LIMIT_S
    while not wait([answer], LOOKS_S).done:
        if getattr(executor, "is_failed", False):
            raise WorkerLost("vLLM has lost a worker, and ends the engine")
        if time.monotonic() > until:
            raise WorkerLost(f"no answer of all workers within {LIMIT_S:.0f} s")
    return answer.result()


def _lost(executor: Any) -> str:
    """The ranks of RayExecutorV2 whose nodes are dead, for a message. The errors of other executors name them."""
    handles = getattr(executor, "ray_worker_handles", None)
    if not handles:
        return ""
    until = time.monotonic() + NOTICED_WITHIN_S
    while True:
        alive = {node["NodeID"] for node in sys.modules["ray"].nodes() if node["Alive"]}
        dead = [f"rank {h.rank} on Ray node {h.node_id[:12]}" for h in handles if h.node_id not in alive]
        if dead:
            return f"; lost: {', '.join(dead)}"
        if time.monotonic() > until:
            return ""
        time.sleep(0.5)


def install() -> None:
    """Add the method in an engine core's process, and in a front end, of which that can be a fork."""
    if FRONT_END in sys.modules:
        importlib.import_module(CORE)
    if CORE in sys.modules:
        setattr(sys.modules[CORE].EngineCore, NAME, every_node)
