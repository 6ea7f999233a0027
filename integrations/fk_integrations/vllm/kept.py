"""Compiled code and CUDA graphs from before a patch, kept in memory so that an undo neither compiles nor captures.

A graph replays on the addresses of its capture. It is used again only if the model's tensors, the KV cache and vLLM's
workspaces are where they were.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastkernels.core.env import Environment
from fk_integrations.vllm.attention import named_modules

log = logging.getLogger("fastkernels")
SPARE = 1 << 30  # bytes that stay free on the device, in addition to the activations of the largest batch
_UNKNOWN = itertools.count(-1, -1)
Address = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Kept:
    """Code and graphs of a worker before a change.

    code       compiled code; None if it cannot be used again
    graphs     (holder, name of its attribute, graphs)
    captured   (manager of graphs, its flag)
    addresses  of all that the graphs read and write; None: graphs are not kept
    """

    code: Any
    graphs: tuple[tuple[Any, str, Any], ...] = ()
    captured: tuple[tuple[Any, bool], ...] = ()
    addresses: frozenset[Address] | None = None

    def whole(self, worker: Any) -> bool:
        """Whether code and graphs can run as they are."""
        if self.code is None or self.addresses is None:
            return False
        moved = self.addresses - addresses(worker)
        if moved:
            log.info(
                "CUDA graphs are captured again: %d tensors have moved, such as %s", len(moved), min(moved)[0]
            )
        return not moved

    def restore_graphs(self) -> None:
        for holder, name, graphs in self.graphs:
            setattr(holder, name, graphs)
        for manager, flag in self.captured:
            manager._graphs_captured = flag


def addresses(worker: Any) -> frozenset[Address]:
    """The tensors that a graph of this worker may refer to: (name, address, shape)."""
    return frozenset((name, _address(t), tuple(t.shape)) for name, t in _tensors(worker))


def _address(tensor: Any) -> int:
    try:
        return int(tensor.data_ptr())
    except RuntimeError:  # of a wrapper without memory of its own: no address is equal to it
        return next(_UNKNOWN)


def _tensors(worker: Any) -> Iterator[tuple[str, Any]]:
    import torch

    for prefix, module in named_modules(worker.get_model()):
        own = {**vars(module), **dict(module.named_parameters(recurse=False))}
        for name, value in {**own, **dict(module.named_buffers(recurse=False))}.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", value
    caches = list(getattr(worker.model_runner, "kv_caches", None) or [])
    for i, cache in enumerate(caches):
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            if isinstance(tensor, torch.Tensor):
                yield f"KV cache {i}", tensor
    for i, workspace in enumerate(_workspaces() or ()):
        if workspace is not None:
            yield f"workspace {i}", workspace


def _workspaces() -> list[Any] | None:
    """Return vLLM's workspaces, None if unknown. They may grow, and then move, while graphs are captured."""
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        return []
    return getattr(workspace.current_workspace_manager(), "_current_workspaces", None)


def refusal(worker: Any) -> str | None:
    """Why this worker's graphs are not kept, once new ones exist; None: they are.

    Graphs of several ranks also refer to buffers of the ranks' communication, which are not compared.
    """
    import torch

    if worker.vllm_config.parallel_config.world_size > 1:
        return "several ranks share the model"
    if _workspaces() is None:
        return "the workspaces of this vLLM are not known"
    if torch.device(worker.device).type != "cuda":
        return None
    if not Environment.read().keep_graphs:  # off by default: no GPU has run a kept graph yet
        return "FASTKERNELS_KEEP_GRAPHS=1 is not set"
    free, total = torch.cuda.mem_get_info(worker.device)
    needed = SPARE + int(getattr(worker, "peak_activation_memory", total // 10))
    if free < needed:
        return f"{free >> 20} MiB are free, and {needed >> 20} MiB are needed"
    return None
