"""The garbage collector's view of a host's process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Heap:
    """The heap during a change. collected: whether what the change replaced was collected."""

    def __init__(self) -> None:
        self.collected = False

    def collect(self) -> None:
        """Free what the change has replaced: it was frozen before the change, or by the host meanwhile."""
        gc.unfreeze()
        gc.collect()
        self.collected = True


@contextmanager
def frozen_again() -> Iterator[Heap]:
    """Freeze the heap at the end if it was frozen at the start; what a change has left behind is collected first.

    Hosts freeze their heap after start-up, so that no collection scans models and compiled code while they serve.
    Capturing CUDA graphs unfreezes all of it. Until the end it stays frozen: each of the collections of compilers and
    of a capture would scan all of it, for half a second.
    """
    heap, frozen = Heap(), gc.get_freeze_count() > 0
    try:
        yield heap
    finally:
        if frozen:
            if not heap.collected:
                heap.collect()
            gc.freeze()
