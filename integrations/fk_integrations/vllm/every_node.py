"""Requests to the workers of a vLLM engine on several machines. Each rank answers, also one without FastKernels.

They go through the engine core, whose process may send functions to workers: a missing method is an error of the whole
call in vLLM, without the rank, and leaves the answers of other ranks for the next call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fk_integrations.core.nodes import node

NAME = "fastkernels_every_node"
MISSING = "FastKernels is not installed here, or VLLM_PLUGINS leaves it out"


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
    """EngineCore.fastkernels_every_node: the replies of all workers. Raises RuntimeError with the machines lost."""
    import cloudpickle

    for module in ("fk_integrations.core.nodes", __name__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    try:
        function = partial(ask, node, MISSING)
        replies: list[str] = core.model_executor.collective_rpc(function, args=(request,))
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}{_lost(core)}") from error
    return replies


def _lost(core: Any) -> str:
    """The nodes of the engine's workers on Ray that are dead, for a message."""
    ray, group = sys.modules.get("ray"), core.vllm_config.parallel_config.placement_group
    if ray is None or group is None:
        return ""
    alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
    used = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    dead = [f"Ray node {name[:12]}" for name in sorted(used - alive) if name]
    return f"; lost: {', '.join(dead)}" if dead else ""


def install() -> None:
    """Add the method, in the process of an engine core."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        setattr(core.EngineCore, NAME, every_node)
