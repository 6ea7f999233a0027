"""The wall time of a patch, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

Seconds = dict[str, float]  # {phase: its seconds}, in the order of the phases


@contextmanager
def timed(seconds: Seconds, phase: str) -> Iterator[None]:
    """Add the time of the block, less that of phases inside it, to a phase."""
    began, before = time.monotonic(), sum(seconds.values())
    try:
        yield
    finally:
        inside = sum(seconds.values()) - before
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began - inside


def slowest(several: Iterable[Mapping[str, float]]) -> Seconds:
    """Each phase as long as the slowest process took for it."""
    found: Seconds = {}
    for seconds in several:
        for phase, value in seconds.items():
            found[phase] = max(value, found.get(phase, 0.0))
    return found


def line(seconds: Mapping[str, float]) -> str:
    """The phases that took at least 50 ms, in text."""
    parts = [f"{phase} {value:.1f}" for phase, value in seconds.items() if value >= 0.05]
    return f"{sum(seconds.values()):.1f} s" + (f": {', '.join(parts)}" if parts else "")
