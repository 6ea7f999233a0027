"""Correctness of a kernel's call, alone and in concurrent CUDA graphs.

Kernels that start early must not read their inputs too early, and calls on two streams must not share tickets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

LIMITS = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # largest error, absolute and relative


def problem(
    call: Callable[[], torch.Tensor],
    want: torch.Tensor,
    limits: Mapping[torch.dtype, float] = LIMITS,
    rms: float = math.inf,
) -> str:
    """Return '' if the call gives `want` (float64) with equal bits twice; else the problem.

    limits: by output dtype; rms: the largest RMS error, relative to the values.
    """
    try:
        first, second = call(), call()
        if not torch.equal(first, second):
            return "two equal calls have other bits"
        error, limit = (first.double() - want).abs(), limits[first.dtype]
        if not bool(error.isfinite().all()):
            return f"{int((~error.isfinite()).sum())} values are not finite"
        size = want.square().mean().sqrt().item()
        if not bool((error <= limit + limit * want.abs()).all()) or error.square().mean().sqrt() > rms * size:
            return f"largest error {error.max().item():.3g}, where values are {size:.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


class SideBySide:
    """A CUDA graph of each call, each with its own stream. `outs`: outputs of the captured calls."""

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
        """Replay each graph this many times, on all streams at once, between two synchronizations."""
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
