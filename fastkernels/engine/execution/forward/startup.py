"""Measures the start of an engine phase by phase."""

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
    """Exclude all current objects from garbage collection.

    A collection of the 250,000 objects of PyTorch, a tokenizer and an engine takes 0.2 s, and a step waits for it. Use
    it only in a process that does nothing but serve: current objects are never collected.
    """
    gc.collect()
    gc.freeze()


class Phases:
    """Seconds of each phase, in order. `mark` ends a phase and begins the next one.

    began    creation time by time.monotonic(), which all processes of a machine share
    kernels  number of kernels from the disk caches, number compiled, and seconds of compilation
    """

    def __init__(self) -> None:
        self.began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.kernels = {"cached": 0, "compiled": 0, "compile_s": 0.0}

    def mark(self, name: str) -> None:
        """Add the time since the last mark to the phase `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the last mark."""
        return self._last - self.began

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the kernels that Triton and NVRTC load or compile inside. Does not initialize CUDA."""
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
        """A summary for the log."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        k, before = self.kernels, process_age(self.began)
        compiled = f"{k['compiled']} compiled in {k['compile_s']:.1f} s" if k["compiled"] else "none compiled"
        process = "" if before is None else f", {before + self.total:.1f} s after its process began"
        return (
            f"the engine is ready in {self.total:.1f} s{process} ({parts}; {k['cached']} kernels from the cache,"
            f" {compiled})"
        )


def process_age(now: float) -> float | None:
    """Seconds from the start of this process to `now` (time.monotonic()), to 10 ms; None outside of Linux."""
    try:
        # The second field, the name, may contain blanks and brackets; field 22 is the start time since boot.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    except (OSError, AttributeError, IndexError, ValueError):
        return None
    return now + boot - began
