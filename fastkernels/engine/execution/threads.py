"""PyTorch's threads on the CPU, next to a model on a GPU: one, as in vLLM's processes.

The CPU computes small tensors there, such as images of some hundred pixels. Threads that wait for each
other cost more: with 32 of them, an image of 256 x 256 pixels was normalized in 24 ms, and with one in 0.7 ms (H200, 32
cores). A value of OMP_NUM_THREADS stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def use_one(device: torch.device) -> None:
    """In this thread and in those that start later, next to a device that is no CPU."""
    if device.type != "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextlib.contextmanager
def one(device: torch.device) -> Iterator[None]:
    """The same inside of the context."""
    before = torch.get_num_threads()
    use_one(device)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
