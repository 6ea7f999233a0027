"""More processes for Inductor while a live patch or its undo compiles: vLLM limits a worker to one thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

LEAST, MOST = 4, 8  # processes: with fewer, their start takes longer than they save


@contextlib.contextmanager
def several(ranks: int) -> Iterator[None]:
    """Compile Inductor's kernels in several processes, which end with the block; `ranks` share the machine's cores.

    Kernels compile in this process until the others have started. Compiled code and the key of its cache stay the same.
    """
    from torch._inductor import async_compile, config

    threads = min(len(os.sched_getaffinity(0)) // max(ranks, 1), MOST)
    before = config.compile_threads
    if threads < LEAST:
        yield
        return
    config.compile_threads = threads
    try:
        with contextlib.suppress(Exception):  # without them this process compiles, as before
            async_compile.AsyncCompile.use_process_pool()  # starts them
        yield
    finally:
        config.compile_threads = before
        with contextlib.suppress(Exception):  # an error here must not replace one of the block
            async_compile.shutdown_compile_workers()
