"""Ours or PyTorch's code for a shape, by measurement: for models of our engine, when a step runs for the first time.

Inside `measuring`, an op with a new shape times both in CUDA graphs. The faster one runs from then on, also in graphs
that are captured later. Nothing is measured elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from fastkernels.core.runtime.graph_capture import captured

log = logging.getLogger("fastkernels")
CALLS, ROUNDS = 8, 3  # of a graph
MOST = 1 << 14  # keys that are kept: in a server whose inputs have ever new shapes, ours runs from then on
MARGIN = 0.97  # of our time, which PyTorch's must not exceed
_state = threading.local()
_slower: dict[Hashable, str | None] = {}  # by op and shape: why ours does not run


@contextmanager
def measuring() -> Iterator[None]:
    """In this thread, ops measure shapes that they have not seen."""
    before, _state.on = getattr(_state, "on", False), True
    try:
        yield
    finally:
        _state.on = before


def slower(
    op: str,
    what: Hashable,
    x: torch.Tensor,
    ours: Callable[[], object],
    other: Callable[[], object],
) -> str | None:
    """Why PyTorch's code is to run in place of ours: it was faster for this shape. None: ours.

    what  the time depends on, next to x, whose first size, a batch, counts as the next power of two: a server that
          meets all batches measures few
    """
    on = getattr(_state, "on", False)
    if not x.is_cuda or not (on or _slower):
        return None
    sizes = 1 << max(x.shape[0] - 1, 0).bit_length(), *x.shape[1:]
    key = op, x.device.index, x.dtype, sizes, tuple(x.stride()), what
    if key in _slower or not on or len(_slower) >= MOST or torch.cuda.is_current_stream_capturing():
        return _slower.get(key)
    _state.on = False  # the calls that are timed decide nothing
    try:
        times = _time(ours), _time(other)
    except Exception as error:  # what cannot be captured, or has no memory
        log.debug("%s: nothing measured for %s: %s", op, tuple(x.shape), error)
        _slower[key] = None
        return None
    finally:
        _state.on = True
    _slower[key] = None
    if times[1] < MARGIN * times[0]:
        _slower[key] = (
            f"PyTorch's code takes {1e3 * times[1]:.1f} us for this shape, ours {1e3 * times[0]:.1f}"
        )
    return _slower[key]


def forget() -> None:
    """Measure all shapes again."""
    _slower.clear()


def _time(call: Callable[[], object]) -> float:
    """Milliseconds of a call in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with captured(graph, stream=stream):
        for _ in range(CALLS):
            call()
    found = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / CALLS)
    return min(found)
