"""Capture of CUDA graphs in a process whose other threads use the GPU, too, such as a second engine's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_one_at_a_time = threading.Lock()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """torch.cuda.graph, after captures of other threads. These may allocate memory meanwhile, without an error."""
    with _one_at_a_time, torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
        yield
