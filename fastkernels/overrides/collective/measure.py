"""For which messages kernels over symmetric memory are faster than what a group has: measured in captured graphs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import registry
from fastkernels.core.communicator import Communicator
from fastkernels.overrides.collective import words

SIZES = tuple(4096 << i for i in range(12))  # bytes of the measured messages: 4 KiB to 8 MiB
# Bytes of a rank's tokens, 4 KiB to 1 MiB. A kernel is compiled for each.
EXPERT_SIZES = tuple(4096 << i for i in range(0, 9, 2))
EXPERT_OPS = ("ep_dispatch", "ep_dispatch_fp8", "ep_combine")
CHANNELS, EXPERTS, BLOCK = 2048, 8, 128  # of such a token, and channels of a scale
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


def choose_experts(made: Communicator) -> dict[str, int]:
    """As `choose`, for each op of EXPERT_OPS against its composed provider.

    Returns the limits of those for which ours is faster: bytes that a rank's tokens have as they are sent.
    """
    if made.device.type != "cuda" or made.size == 1 or made.connect() is not None:
        return {}
    limits = {}
    for name in EXPERT_OPS:
        providers = {p.name: p for p in registry.get(name).op.providers}
        supports = providers["triton"].supports
        assert supports is not None
        sizes = [size for size in EXPERT_SIZES if supports(*expert_arguments(name, size, made)) is None]
        if not sizes:
            continue
        ours, theirs = (_calling(providers[provider].fn) for provider in ("triton", "composed"))
        arguments = partial(expert_arguments, name, made=made)
        times = _times(made, ours, theirs, contextlib.nullcontext, sizes, arguments)
        most = limit(_slowest(made, times), sizes)
        if most > 0:
            limits[name] = most
    made.faster.update(limits)
    return limits


def _calling(fn: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda arguments: fn(*arguments)


def expert_arguments(op: str, size: int, made: Communicator) -> list[Any]:
    """Arguments of an op of EXPERT_OPS whose tokens of a rank have so many bytes as they are sent."""
    itemsize = 1 if op == "ep_dispatch_fp8" else 2
    tokens = max(1, size // (itemsize * CHANNELS))
    width = size // (itemsize * tokens)
    if op == "ep_combine":
        every = made.size * tokens
        rows = torch.ones(every, width, dtype=torch.bfloat16, device=made.device)
        return [rows, torch.arange(every, dtype=torch.int32, device=made.device), made.name]
    x = torch.ones(tokens, width, dtype=torch.bfloat16, device=made.device)
    experts = EXPERTS * made.size
    ids = torch.arange(tokens * EXPERTS, dtype=torch.int32, device=made.device) % experts
    weights = torch.ones(tokens, EXPERTS, device=made.device)
    block = [BLOCK] if op == "ep_dispatch_fp8" else []
    return [x, ids.view(tokens, EXPERTS), weights, experts, *block, made.name]


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
