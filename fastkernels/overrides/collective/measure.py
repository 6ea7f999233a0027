"""For which messages kernels over symmetric memory are faster than what a group has: measured in captured graphs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import registry
from fastkernels.core.communicator import Communicator

SIZES = tuple(4096 << i for i in range(12))  # bytes of the measured messages: 4 KiB to 8 MiB
CALLS, ROUNDS = 20, 9
MARGIN = 0.98  # of the other's time, which ours must not exceed
Sum = Callable[[torch.Tensor], torch.Tensor]
Times = tuple[tuple[float, float], ...]  # of each message: seconds of ours, of the other


def limit(times: Times, sizes: Sequence[int] = SIZES) -> int:
    """Bytes of the largest message such that ours is faster for it and all smaller ones; -1: for none."""
    most = -1
    for size, (ours, theirs) in zip(sizes, times, strict=True):
        if ours > MARGIN * theirs:
            break
        most = size
    return most


def measure(
    made: Communicator, op: str, theirs: Sum, capture: Callable[[], Any] = contextlib.nullcontext
) -> Times:
    """Time a call of each of SIZES on this rank, ours and the other's in turn. All ranks must come here.

    capture  the context in which the other is captured. Raises RuntimeError if a call or a capture fails.
    """
    kernel = next(p.fn for p in registry.get(op).op.providers if p.name == "measured")

    def ours(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, made.name)

    def made_of(size: int) -> torch.Tensor:
        return torch.ones(size // 2, dtype=torch.bfloat16, device=made.device)

    return times_of(made, ours, theirs, capture, SIZES, made_of)


def times_of(
    made: Communicator, ours: Any, theirs: Any, capture: Callable[[], Any], sizes: Sequence[int],
    made_of: Callable[[int], Any],
) -> Times:  # fmt: skip
    """Time a call of ours and of the other's in turn, with `made_of(size)` for each size."""
    times = []
    for size in sizes:
        x = made_of(size)
        runs = [
            _prepared(f, x, made, context)
            for f, context in ((ours, contextlib.nullcontext), (theirs, capture))
        ]
        taken: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for run, into in zip(runs, taken, strict=True):
                into.append(run())
        times.append((statistics.median(taken[0]), statistics.median(taken[1])))
    return tuple(times)


def _prepared(
    fn: Callable[[Any], Any], x: Any, made: Communicator, capture: Callable[[], Any]
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


def slowest(made: Communicator, times: Times) -> Times:
    """The times of the slowest rank."""
    most = torch.tensor(times, dtype=torch.float64, device=made.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=made.process_group)
    return tuple((ours, theirs) for ours, theirs in most.tolist())


def choose(made: Communicator) -> int:
    """Use ours in a group of GPUs up to the size for which it is faster than NCCL in all ranks; returns the bytes.

    All ranks must come here. Without symmetric memory, or in a group of one rank, nothing changes and -1 is returned.
    """
    if made.nodes is not None:
        made = made.nodes.inside
    if made.device.type != "cuda" or made.size == 1 or made.connect() is not None:
        return -1
    nccl = next(p.fn for p in registry.get("all_reduce").op.providers if p.name == "nccl")
    times = measure(made, "all_reduce", lambda x: nccl(x, made.name))
    most = limit(slowest(made, times))
    if most > 0:
        made.faster["all_reduce"] = most
    return most
