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
from fastkernels.overrides.collective import words

SIZES = tuple(4096 << i for i in range(12))  # bytes of the measured messages: 4 KiB to 8 MiB
EXPERT_SIZES = tuple(
    4096 << i for i in range(0, 9, 2)
)  # bytes of a rank's tokens, each compiled: 4 KiB to 1 MiB
CHANNELS, EXPERTS = 2048, 8  # of such a token
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

    return _times(made, ours, theirs, capture, SIZES, made_of)


def measure_experts(
    made: Communicator, theirs: Callable[[list[torch.Tensor]], torch.Tensor],
    capture: Callable[[], Any] = contextlib.nullcontext,
) -> Times:  # fmt: skip
    """As `measure`, of a dispatch and a combine of tokens with EXPERTS experts each, in bfloat16."""
    symmetric = made.symmetric
    assert symmetric is not None, made.without

    def ours(tensors: list[torch.Tensor]) -> torch.Tensor:
        return words.scatter_words(words.gather_words(tensors, symmetric)[0], symmetric)

    def made_of(size: int) -> list[torch.Tensor]:
        tokens = max(1, size // (2 * CHANNELS))
        x = torch.ones(tokens, size // (2 * tokens), dtype=torch.bfloat16, device=made.device)
        weights = torch.ones(tokens, EXPERTS, device=made.device)
        return [x, weights, torch.ones(tokens, EXPERTS, dtype=torch.int32, device=made.device)]

    return _times(made, ours, theirs, capture, EXPERT_SIZES, made_of)


def _times(
    made: Communicator, ours: Any, theirs: Any, capture: Callable[[], Any], sizes: Sequence[int],
    made_of: Callable[[int], Any],
) -> Times:  # fmt: skip
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


def choose_experts(made: Communicator) -> int:
    """As `choose`, for ep_dispatch and ep_combine against their composed providers; bytes of a rank's tokens."""
    if made.device.type != "cuda" or made.size == 1 or made.connect() is not None:
        return -1
    dispatch, combine = (
        {p.name: p for p in registry.get(name).op.providers} for name in ("ep_dispatch", "ep_combine")
    )
    experts = EXPERTS * made.size

    def made_of(size: int) -> list[torch.Tensor]:
        tokens = max(1, size // (2 * CHANNELS))
        x = torch.ones(tokens, size // (2 * tokens), dtype=torch.bfloat16, device=made.device)
        ids = torch.arange(tokens * EXPERTS, dtype=torch.int32, device=made.device) % experts
        return [x, ids.view(tokens, EXPERTS), torch.ones(tokens, EXPERTS, device=made.device)]

    def both(provider: str) -> Sum:
        def run(tensors: Any) -> torch.Tensor:
            rows, _, _, source = dispatch[provider].fn(*tensors, experts, made.name)
            summed: torch.Tensor = combine[provider].fn(rows, source, made.name)
            return summed

        return run

    def fits(size: int) -> bool:
        x, ids, weights = made_of(size)
        every = len(x) * made.size
        rows, source = x.new_empty(every, x.shape[1]), ids.new_empty(every)
        supports = dispatch["triton"].supports, combine["triton"].supports
        assert supports[0] is not None and supports[1] is not None
        return (
            supports[0](x, ids, weights, experts, made.name) is None
            and supports[1](rows, source, made.name) is None
        )

    sizes = [size for size in EXPERT_SIZES if fits(size)]
    times = _times(made, both("triton"), both("composed"), contextlib.nullcontext, sizes, made_of)
    most = limit(_slowest(made, times), sizes)
    if most > 0:
        made.faster["ep_dispatch"] = most
    return most


def _slowest(made: Communicator, times: Times) -> Times:
    """The times of the slowest rank."""
    slowest = torch.tensor(times, dtype=torch.float64, device=made.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=made.process_group)
    return tuple((ours, theirs) for ours, theirs in slowest.tolist())


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
    most = limit(_slowest(made, times))
    if most > 0:
        made.faster["all_reduce"] = most
    return most
