"""The garbage collector's view of a host's process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_again() -> Iterator[None]:
    """Freeze the heap at the end if it was frozen at the start; what a change has left behind is collected first.

    Hosts freeze their heap after start-up, so that no collection scans models and compiled code while they serve.
    Capturing CUDA graphs unfreezes all of it.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # or the code and graphs that the change replaces would never be collected
    try:
        yield
    finally:
        if frozen:
            gc.collect()
            gc.freeze()
