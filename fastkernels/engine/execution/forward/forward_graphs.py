"""CUDA graphs of a model's forward pass by the shapes of its inputs, captured when a shape comes a second time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.core.runtime.graph_capture import captured
from fastkernels.core.runtime.measured import measuring

SEEN = 1024  # shapes that are remembered
log = logging.getLogger("fastkernels")
MOST = 16  # graphs that are kept by default; the least recently used one goes first


@dataclass(frozen=True)
class _Graph:
    """function: it holds the tensors that the graph reads, apart from its inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    output: Any
    function: Callable[..., Any]


class ForwardGraphs:
    """Runs functions of tensors, by key and shapes. The first run is eager: it compiles and chooses kernels.

    All graphs share one memory pool, so an output is valid until the next call. most: graphs that are kept.
    """

    def __init__(self, device: torch.device, most: int = MOST):
        self._device, self._most = device, most
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._eager: set[Hashable] = set()
        self.replays = 0

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """function(*inputs), tensors, which depend on the key and the inputs only.

        The function may read other tensors that follow from the key: those of the call that is captured are kept.
        """
        key = (key, tuple((tuple(t.shape), t.dtype) for t in inputs))
        if key not in self._graphs:
            if len(self._graphs) >= SEEN:
                self._eager.discard(self._graphs.popitem(last=False)[0])
            self._graphs[key] = None
            with measuring():
                return function(*inputs)
        if key in self._eager:
            return function(*inputs)
        if self._graphs[key] is None:
            if len(self) >= self._most:
                self._graphs.pop(next(k for k, graph in self._graphs.items() if graph is not None))
            try:
                self._graphs[key] = self._capture(function, inputs)
            except RuntimeError as error:  # of an op that cannot be captured
                log.warning("no CUDA graph of inputs %s: %s", tuple(inputs[0].shape), error)
                self._eager.add(key)
        self._graphs.move_to_end(key)
        found = self._graphs[key]
        if found is None:
            return function(*inputs)
        for static, given in zip(found.inputs, inputs, strict=True):
            static.copy_(given)
        found.graph.replay()
        self.replays += 1
        return found.output

    def _capture(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> _Graph:
        static = tuple(t.clone(memory_format=torch.preserve_format) for t in inputs)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool=self._pool):
            output = function(*static)
        log.info("captured a CUDA graph of inputs %s", tuple(inputs[0].shape))
        return _Graph(graph, static, output, function)
