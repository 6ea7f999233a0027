"""Ours or PyTorch's code for a shape, by measurement: for models of our engine, when a step runs for the first time.

Inside `measuring`, an op with a new shape times both in CUDA graphs. The faster one runs from then on, also in graphs
that are captured later. Nothing is measured elsewhere, nor for a batch between two near ones with the same choice. Once
a step has taken BUDGET_S, PyTorch's code runs for the shapes that are left, until a later step measures them. Times are
kept in FASTKERNELS_CACHE/measured for the chip, the versions and our sources (core/kept_files.py): the next process
measures none of these shapes, and compiles only what it runs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fastkernels
from fastkernels.core import kept_files
from fastkernels.core.env import Environment
from fastkernels.core.runtime import ahead
from fastkernels.core.runtime.graph_capture import GraphPool, captured_on

log = logging.getLogger("fastkernels")
NAME = "measured"
CALLS, ROUNDS = 8, 3  # of a graph
MOST = 1 << 14  # keys that are kept: in a server whose inputs have ever new shapes, ours runs from then on
MARGIN = 0.97  # of our time, which PyTorch's must not exceed
BUDGET_S = 10.0  # that a step with new shapes may measure, compilations included
NEAR = 2  # powers of two between batches, whose common choice holds for those between them
KEEP_S = 5.0  # between writes within a step, so that a process that is killed in a long one keeps its times
_state = threading.local()
_slower: dict[Hashable, str | None] = {}  # by op and shape: why ours does not run
_left: set[Hashable] = set()  # shapes of these for which a step had no time
_now = time.monotonic


@contextmanager
def measuring() -> Iterator[set[Hashable]]:
    """In this thread, ops measure shapes that they have not seen. FASTKERNELS_VERIFY=0: only kept choices apply.

    Yields the set of shapes for which there was no time, which grows until it ends. The next step measures them.
    """
    before, _state.on = getattr(_state, "on", False), True
    if not before:
        _state.begun, _state.pool, _state.left_out, _state.failed = _now(), None, set(), False
    try:
        yield _state.left_out
    finally:
        _state.on = before
        if not before:
            _end()


def _end() -> None:
    for chip in list(_chips.values()):
        chip.write()
    if _state.pool is not None:  # memory of graphs that were timed
        _state.pool = None
        torch.cuda.empty_cache()
    if _state.left_out:
        log.warning(
            "%d shapes of a step were not measured within %g s: PyTorch's code runs for them until they come again",
            len(_state.left_out), BUDGET_S,
        )  # fmt: skip


def slower(
    op: str,
    what: Hashable,
    x: torch.Tensor,
    ours: Callable[[], object],
    other: Callable[[], object],
) -> str | None:
    """Why PyTorch's code is to run in place of ours: it was faster for this shape. None: ours.

    what  the time depends on, next to x, whose first size, a batch, counts as the next power of two: a server that
          meets all batches measures few. Its repr is the same in all processes
    """
    on = getattr(_state, "on", False)
    if not x.is_cuda or not (on or _slower):
        return None
    batch, rest = 1 << max(x.shape[0] - 1, 0).bit_length(), tuple(x.shape[1:])
    key = op, x.device.index, x.dtype, (batch, *rest), tuple(x.stride()), what
    known = key in _slower and not (on and key in _left - _state.left_out)
    if known or not on or len(_slower) >= MOST or torch.cuda.is_current_stream_capturing():
        return _slower.get(key)
    chip = _chip(x.device.index)

    def name(count: int) -> str:
        return repr((op, str(x.dtype), (count, *rest), tuple(x.stride()), what))

    times = chip.times.get(name(batch)) or _between(chip, name, batch)
    if times is None and ahead.active():
        return None  # measured in the step itself, which needs ours for it
    if times is None and chip.measures and _now() - _state.begun > BUDGET_S:
        _state.left_out.add(key)
        _left.add(key)
        _slower[key] = f"not measured within {BUDGET_S:g} s of the first step with this shape"
        return _slower[key]
    _state.on = False  # the calls that are timed decide nothing
    try:
        if times is None and chip.measures:
            times = chip.times[name(batch)] = chip.new[name(batch)] = [
                _time(call, x.device) for call in (ours, other)
            ]
            chip.write(KEEP_S)
    except Exception as error:  # what cannot be captured, or has no memory
        level, _state.failed = logging.DEBUG if _state.failed else logging.WARNING, True
        log.log(level, "%s: ours runs for %s, which could not be measured: %s", op, tuple(x.shape), error)
        times = None
    finally:
        _state.on = True
    _left.discard(key)
    _slower[key] = None
    if times is not None and _other_wins(times):
        _slower[key] = (
            f"PyTorch's code takes {1e3 * times[1]:.1f} us for this shape, ours {1e3 * times[0]:.1f}"
        )
    return _slower[key]


def _between(chip: _Chip, name: Callable[[int], str], batch: int) -> list[float] | None:
    """Times of a smaller batch and a larger one that is near, if the same one was faster in both."""

    def first(counts: tuple[int, ...]) -> list[float] | None:
        return next((found for n in counts if n and (found := chip.times.get(name(n))) is not None), None)

    powers = [1 << i for i in range(1, NEAR + 1)]
    less, more = first(tuple(batch // p for p in powers)), first(tuple(batch * p for p in powers))
    if less is None or more is None or _other_wins(less) != _other_wins(more):
        return None
    return less


def _other_wins(times: list[float]) -> bool:
    return times[1] < MARGIN * times[0]


def faster(
    op: str,
    what: Hashable,
    x: torch.Tensor,
    ours: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The result of the faster one; see `slower`."""
    return ahead.run(ours if slower(op, what, x, ours, other) is None else other)


def forget() -> None:
    """Forget all shapes of this process. Those that are kept on disk are read again."""
    _slower.clear()
    _left.clear()
    _chips.clear()


class _Chip:
    """Milliseconds [ours, PyTorch's] by op and shape on one kind of chip: of earlier processes, and new ones.

    measures: whether shapes without times are measured
    """

    def __init__(self, name: str) -> None:
        self.measures = Environment.read().verify is not False
        self.new: dict[str, list[float]] = {}
        self._lock, self._written = threading.Lock(), _now()
        try:
            self._facts: dict[str, str] | None = {
                **kept_files.facts(name, "fastkernels", fastkernels.__version__),
                "cudnn": str(torch.backends.cudnn.version()),
                "tf32": str(torch.backends.cudnn.conv.fp32_precision == "tf32"),  # type: ignore[attr-defined]
            }
            self.times: dict[str, list[float]] = kept_files.read(NAME, self._facts, _is_times)
        except (OSError, ValueError, RuntimeError) as error:  # sources or settings that cannot be read
            log.debug("measured choices are not kept: %s", error)
            self._facts, self.times = None, {}

    def write(self, every: float = 0.0) -> None:
        """Keep new times, if the last write is that many seconds ago."""
        with self._lock:
            if not self.new or _now() - self._written < every:
                return
            new, self.new = self.new, {}
            if self._facts is not None and len(self.times) <= MOST:
                kept_files.add(NAME, self._facts, new, _is_times)
            self._written = _now()


_chips: dict[int | None, _Chip] = {}  # by the index of the device


def _chip(index: int | None) -> _Chip:
    if index not in _chips:
        _chips[index] = _Chip(_name(index))
    return _chips[index]


def _name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)


def _is_times(given: Any) -> bool:
    return (
        isinstance(given, list)
        and len(given) == 2
        and all(type(t) is float and t > 0 and math.isfinite(t) for t in given)
    )


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call in a CUDA graph."""
    if _state.pool is None:
        _state.pool = GraphPool(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # captured_on does not empty the allocator's cache each time
    with captured_on(stream, graph, pool=_state.pool.handle):
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
