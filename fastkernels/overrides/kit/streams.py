"""Independent work of a CUDA graph on several streams.

A product whose tiles do not fill all multiprocessors, or not in its last round, leaves some of them idle until the next
kernel of its stream starts. A kernel of another stream starts there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

SIDES = 2  # streams, in addition to the current one


@cache
def _sides(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(SIDES + 1))


def at_once(work: Sequence[tuple[int, Callable[[], None]]], device: torch.device) -> None:
    """Do the work, pairs of a cost and a function that writes into memory that exists.

    While a CUDA graph is captured, on several streams, of which the current one waits for the others. Elsewhere one
    after the other: launches from Python, and their synchronization, take longer than what they would save.
    """
    if len(work) < 2 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        for _, run in work:
            run()
        return
    main = torch.cuda.current_stream(device)
    # Streams come from a pool: one of these may be the current one.
    sides = [s for s in _sides(device) if s.cuda_stream != main.cuda_stream][: min(SIDES, len(work) - 1)]
    lanes, loads = [main, *sides], [0] * (1 + len(sides))
    for side in sides:
        side.wait_stream(main)
    for cost, run in sorted(work, key=lambda w: -w[0]):
        lane = loads.index(min(loads))
        loads[lane] += cost
        with torch.cuda.stream(lanes[lane]):
            run()
    for side in sides:
        main.wait_stream(side)
