"""What the checks of kernels in CUDA graphs share: graphs that are replayed side by side, and whether their bits stay.

Kernels that start early must not read too early, and calls on two streams must share no tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class SideBySide:
    """A CUDA graph of each call, each with a stream of its own. `outs`: what the calls gave while captured."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.outs: list[Any] = []
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outs.append(call())
            self.graphs.append(graph)
        self.streams = [torch.cuda.Stream() for _ in self.graphs]

    def replay(self, times: int) -> None:
        """Each graph so many times, on all streams at once, between two synchronizations."""
        torch.cuda.synchronize()
        for graph, stream in zip(self.graphs, self.streams, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(times):
                    graph.replay()
        torch.cuda.synchronize()


def other_bits(calls: Sequence[Callable[[], torch.Tensor]], want: Sequence[torch.Tensor]) -> str:
    """'' if graphs of the calls write what is wanted, each time in memory that was NaN before, else what is wrong."""
    graphs = SideBySide(calls)
    for _ in range(20):
        for out in graphs.outs:
            out.fill_(float("nan"))
        graphs.replay(5)
        if not all(torch.equal(a, b) for a, b in zip(graphs.outs, want, strict=True)):
            return "graphs replayed side by side have other bits than calls made one by one"
    return ""
