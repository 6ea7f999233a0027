"""CUDA graphs of a model's forward pass by the shapes of its inputs, captured when a shape comes a second time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.core.runtime import ahead
from fastkernels.core.runtime.graph_capture import GraphPool, captured
from fastkernels.core.runtime.measured import measuring

SEEN = 1024  # shapes that are remembered
log = logging.getLogger("fastkernels")
MOST = 16  # graphs that are kept by default
# A capture takes as long as some eager runs. Once all graphs are there, a shape gets one in place of another's if it
# came GAIN times more often. Of a shape at most MOST_USES runs count, and half of them are forgotten every HALVED runs.
GAIN, MOST_USES, HALVED = 4, 32, 1024


@dataclass(frozen=True)
class _Graph:
    """function: it holds the tensors that the graph reads, apart from its inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    output: Any
    function: Callable[..., Any]


@dataclass
class _Shape:
    """uses: how often it came, see MOST_USES. eager: it cannot be captured.

    left: shapes of its ops that its last run had no time to measure
    """

    graph: _Graph | None = None
    uses: int = 1
    eager: bool = False
    left: int = 0


class ForwardGraphs:
    """Runs functions of tensors, by key and shapes. The first run is eager: it compiles and chooses kernels. The runs
    behind it are, too, while they measure what the one before had no time for.

    All graphs share one memory pool, so an output is valid until the next call. most: graphs that are kept. More shapes
    than that in turn keep those that have graphs, and the others run eagerly.

    convolves  the functions have convolutions: before the first run with a shape, their kernels are compiled in
               parallel. In it cuDNN times its algorithms (`torch.backends.cudnn.benchmark`, which is restored)
    """

    def __init__(self, device: torch.device, most: int = MOST, convolves: bool = False):
        self._device, self._most, self._convolves = device, most, convolves
        self._pool = GraphPool(device)
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()  # the least recently used one first
        self._runs = 0
        self.replays = 0

    def __len__(self) -> int:
        return sum(shape.graph is not None for shape in self._shapes.values())

    def __call__(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """function(*inputs), tensors, which depend on the key and the inputs only.

        The function may read other tensors that follow from the key: those of the call that is captured are kept.
        """
        key = (key, tuple((tuple(t.shape), t.dtype) for t in inputs))
        self._count()
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= SEEN:
                self._shapes.popitem(last=False)
            shape = self._shapes[key] = _Shape()
            return self._choose(shape, function, inputs)
        self._shapes.move_to_end(key)
        shape.uses = min(shape.uses + 1, MOST_USES)
        if shape.left and shape.graph is None:
            return self._choose(shape, function, inputs)
        if shape.graph is None and not shape.eager and self._has_room(shape):
            try:
                shape.graph = self._capture(function, inputs)
            except RuntimeError as error:  # of an op that cannot be captured
                log.warning("no CUDA graph of inputs %s: %s", tuple(inputs[0].shape), error)
                shape.eager = True
        found = shape.graph
        if found is None:
            return function(*inputs)
        for static, given in zip(found.inputs, inputs, strict=True):
            static.copy_(given)
        found.graph.replay()
        self.replays += 1
        return found.output

    def _choose(self, shape: _Shape, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """function(*inputs), whose ops measure. It is left to the next run what this one has no time for."""
        before, shape.left = shape.left, 0
        with measuring() as left, self._choosing():
            if self._convolves and not before:
                with ahead.compiling():
                    function(*inputs)
            output = function(*inputs)
        shape.left = len(left) if not 0 < before <= len(left) else 0  # without progress it ends
        return output

    @contextmanager
    def _choosing(self) -> Iterator[None]:
        """Let cuDNN time the algorithms of new convolutions; PyTorch keeps its choices for this thread."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self._convolves
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def _count(self) -> None:
        self._runs += 1
        if self._runs % HALVED == 0:
            for shape in self._shapes.values():
                shape.uses //= 2

    def _has_room(self, wanted: _Shape) -> bool:
        """Whether one more graph may be captured, for which the one that was used least makes room if there is none."""
        held = [shape for shape in self._shapes.values() if shape.graph is not None]
        if len(held) < self._most:
            return True
        least = min(held, key=lambda shape: shape.uses)
        if wanted.uses < least.uses + GAIN:
            return False
        least.graph = None
        return True

    def _capture(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> _Graph:
        static = tuple(t.clone(memory_format=torch.preserve_format) for t in inputs)
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool=self._pool.handle):
            output = function(*static)
        log.info("captured a CUDA graph of inputs %s", tuple(inputs[0].shape))
        return _Graph(graph, static, output, function)
