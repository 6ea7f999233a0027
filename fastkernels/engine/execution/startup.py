"""How long an engine's start takes, phase by phase: a stopwatch that the engine and its runner share."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastkernels.core import cuda_rtc


def keep_objects() -> None:
    """Python's garbage collector never again looks at what there is now: going through the 250,000 objects of PyTorch,
    a tokenizer and an engine takes 0.2 s, at any time, and a step waits for it.

    For a process that serves and does nothing else: what is garbage later and was there now stays.
    """
    gc.collect()
    gc.freeze()


class Phases:
    """Seconds of each phase, in order; a phase ends when it is marked, and the next one begins.

    began    when this object was made, by time.monotonic(), which is one clock for all processes of a machine
    kernels  how many kernels came from the caches on disk and how many were compiled, with the seconds that took
    """

    def __init__(self) -> None:
        self.began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.kernels = {"cached": 0, "compiled": 0, "compile_s": 0.0}

    def mark(self, name: str) -> None:
        """What ran since the last mark was `name`; a name that comes again is added up."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """From the beginning to the last mark."""
        return self._last - self.began

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the kernels that Triton and NVRTC get ready inside. Calls no CUDA."""
        from triton import knobs

        told, before = knobs.compilation.listener, dict(cuda_rtc.counts)

        def listen(*, times: Any, cache_hit: bool, **rest: Any) -> None:
            self._count(cache_hit, times.total / 1e6)
            if told is not None:
                told(times=times, cache_hit=cache_hit, **rest)

        knobs.compilation.listener = listen
        try:
            yield
        finally:
            knobs.compilation.listener = told
            for name, n in cuda_rtc.counts.items():
                self.kernels[name] += n - before[name]

    def _count(self, cached: bool, seconds: float) -> None:
        self.kernels["cached" if cached else "compiled"] += 1
        self.kernels["compile_s"] += 0.0 if cached else seconds

    def line(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        k, before = self.kernels, process_age(self.began)
        compiled = f"{k['compiled']} compiled in {k['compile_s']:.1f} s" if k["compiled"] else "none compiled"
        process = "" if before is None else f", {before + self.total:.1f} s after its process began"
        return (
            f"the engine is ready in {self.total:.1f} s{process} ({parts}; {k['cached']} kernels from the cache,"
            f" {compiled})"
        )


def process_age(now: float) -> float | None:
    """Seconds from the start of this process to `now`, a time.monotonic(); None where that is not known (not Linux).

    To 10 ms: the kernel counts in ticks.
    """
    try:
        # The second field, the name, may have blanks and brackets of its own; the 22nd is the start, since the boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    except (OSError, AttributeError, IndexError, ValueError):
        return None
    return now + boot - began
