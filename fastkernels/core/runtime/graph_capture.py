"""Capture of CUDA graphs in a process whose other threads use the GPU, too, such as a second engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_one_at_a_time = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """Hold off captures of other threads, which a synchronization of the device would end."""
    with _one_at_a_time:
        yield


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """torch.cuda.graph, after captures of other threads. These may allocate memory meanwhile, without an error."""
    with _one_at_a_time, torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
        yield


@contextmanager
def captured_on(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """The same on one stream for many graphs, without emptying the allocator's cache before each."""
    with _one_at_a_time:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local", **options)
            try:
                yield
            finally:
                graph.capture_end()


class GraphPool:
    """Memory that CUDA graphs share, which lives as long as this object.

    PyTorch ends a pool with its last graph, and refuses captures into it while other code holds its memory. A graph of
    one small kernel keeps it.
    """

    def __init__(self, device: torch.device | int | None):
        self._device = device
        self._held: tuple[Any, torch.cuda.CUDAGraph] | None = None

    @property
    def handle(self) -> Any:
        """The value of a capture's `pool`. Not within a capture."""
        if self._held is None:
            with torch.cuda.device(self._device):
                handle, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
                with captured_on(torch.cuda.Stream(), graph, pool=handle):
                    torch.zeros(1, device="cuda")
            self._held = handle, graph
        return self._held[0]
