"""Searches the highest load that meets the SLOs, by bisection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

CLOSE = 0.05  # a search for a rate ends when its limits differ by this share


@dataclass
class Found:
    """The highest load that met the SLOs (0: none did), and whether it is the upper limit of the search."""

    value: float
    at_limit: bool
    tried: dict[float, bool] = field(default_factory=dict)


async def highest(meets: Callable[[float], Awaitable[bool]], low: float, high: float, whole: bool) -> Found:
    """The highest load in [low, high] for which `meets(load)`; `whole`: loads are whole numbers.

    Doubles from `low` until a load fails, then halves the interval: few probes are overloads, where each takes long.
    Loads between `low` and the result are taken to meet the SLOs, too.
    """
    tried: dict[float, bool] = {}

    async def probe(load: float) -> bool:
        tried[load] = await meets(load)
        return tried[load]

    good, load = 0.0, low
    while await probe(load):
        good = load
        if load == high:
            return Found(high, True, tried)
        load = min(high, 2 * load)
    bad = load
    while good and (bad - good > 1 if whole else bad > good * (1 + CLOSE)):
        middle = (good + bad) // 2 if whole else (good + bad) / 2
        if await probe(middle):
            good = middle
        else:
            bad = middle
    return Found(good, False, tried)
