"""Our collectives in a host's tensor-parallel group: join it in all ranks, and measure for which messages ours is used.

All ranks of the group come here at the same point of a patch. Each learns what the others have found, so that all
change the host or none does.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import parallel, registry
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.collective.in_hosts import Ours

LIMIT_S = 60.0  # a rank may be so late
SIZES = tuple(4096 << i for i in range(12))  # bytes of the measured messages: 4 KiB to 8 MiB
CALLS, ROUNDS = 20, 9
MARGIN = 0.98  # of the host's time, which ours must not exceed
_numbers = itertools.count()
Sum = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Found:
    """One rank's finding: why it keeps the host's code, or the times of each measured message (ours, the host's)."""

    reason: str = ""
    times: tuple[tuple[float, float], ...] = ()


def join(
    communicator: Any, host_class: Any, op: str, everywhere: bool = False
) -> tuple[Communicator, Ours] | str:
    """Join the group of a host's communicator; why all ranks keep the host's code, if they do.

    communicator  has cpu_group (gloo), device_group, device, world_size and rank_in_group
    everywhere    use ours for all messages that it supports, without a measurement. So it is on a CPU
    Raises RuntimeError if a rank does not come in LIMIT_S.
    """
    cpu_group, device = communicator.cpu_group, torch.device(communicator.device)
    dist.monitored_barrier(cpu_group, timedelta(seconds=LIMIT_S), wait_all_ranks=True)
    made = parallel.join(
        f"host{next(_numbers)}", communicator.rank_in_group, communicator.world_size, communicator.device_group,
        str(device), LIMIT_S,
    )  # fmt: skip
    try:
        found = agreed(cpu_group, _Found(_unsupported(made, op)))
        if not found.reason and not everywhere and device.type != "cpu":
            theirs: Sum = lambda x: host_class.all_reduce(communicator, x)  # noqa: E731
            found = agreed(cpu_group, measured(made, op, theirs, capture_of(communicator)))
    except BaseException:
        made.close()
        raise
    most = 1 << 62
    if found.times:
        most = limit(found.times)
        made.faster[op] = most
    if found.reason or most < 0:
        made.close()
        return found.reason or "for no message faster than the host's here"
    return made, Ours(made.name, most)


def _unsupported(made: Communicator, op: str) -> str:
    """Why this rank cannot run ours at all; '' if it can."""
    if made.device.type == "cpu":
        return made.without.get("meeting", "")
    if made.device.type != "cuda":
        return f"no kernel for {made.device.type}"
    try:
        return made.connect() or ""
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]


def agreed(cpu_group: Any, mine: _Found) -> _Found:
    """Combine the findings of all ranks: the first reason, or the longest times of each message."""
    every: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(every, mine, group=cpu_group)
    for rank, found in enumerate(every):
        if found.reason:
            return _Found(f"rank {rank}: {found.reason}")
    by_size = zip(*(found.times for found in every), strict=True)
    return _Found(times=tuple((max(t[0] for t in each), max(t[1] for t in each)) for each in by_size))


def limit(times: tuple[tuple[float, float], ...], sizes: tuple[int, ...] = SIZES) -> int:
    """Bytes of the largest message such that ours is faster for it and all smaller ones; -1: for none."""
    most = -1
    for size, (ours, theirs) in zip(sizes, times, strict=True):
        if ours > MARGIN * theirs:
            break
        most = size
    return most


def capture_of(communicator: Any) -> Callable[[], Any]:
    """The context in which the host captures graphs: its kernel then reads captured tensors in place."""
    custom = getattr(communicator, "ca_comm", None)
    if custom is None or getattr(custom, "disabled", False):
        return contextlib.nullcontext
    found: Callable[[], Any] = custom.capture
    return found


def measured(made: Communicator, op: str, theirs: Sum, capture: Callable[[], Any]) -> _Found:
    """Seconds of a call for each of SIZES, interleaved; in captured graphs on a GPU."""
    kernel = next(p.fn for p in registry.get(op).op.providers if p.name == "measured")

    def ours(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, made.name)

    try:
        times = []
        for size in SIZES:
            x = torch.ones(size // 2, dtype=torch.bfloat16, device=made.device)
            runs = [
                _prepared(f, x, made, context)
                for f, context in ((ours, contextlib.nullcontext), (theirs, capture))
            ]
            taken: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for run, into in zip(runs, taken, strict=True):
                    into.append(run())
            times.append((statistics.median(taken[0]), statistics.median(taken[1])))
        return _Found(times=tuple(times))
    except RuntimeError as error:
        return _Found(f"a measurement failed: {str(error).splitlines()[0][:200]}")


def _prepared(
    fn: Sum, x: torch.Tensor, made: Communicator, capture: Callable[[], Any]
) -> Callable[[], float]:
    """A function that returns the seconds of a call."""
    for _ in range(3):
        fn(x)
    if made.device.type != "cuda":

        def run() -> float:
            start = time.perf_counter()
            for _ in range(CALLS):
                fn(x)
            return (time.perf_counter() - start) / CALLS

        return run
    torch.cuda.synchronize(made.device)
    graph = torch.cuda.CUDAGraph()
    with capture(), torch.cuda.graph(graph):
        kept = [fn(x) for _ in range(CALLS)]
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def replay() -> float:
        torch.cuda.synchronize(made.device)
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return 1e-3 * events[0].elapsed_time(events[1]) / len(kept)

    return replay
