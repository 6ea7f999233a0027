"""Times fused_experts on a GPU under captured, uniform random and one-sided routing, for all kernels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastkernels.overrides.moe import fused_experts
from fastkernels.overrides.moe.moe_tiles import Tiles, tiles, wide
from fk_bench.routing.stats import counts_of, load_stats
from fk_bench.routing.study import Routing, batch_of, shape_of

SOURCES = ("captured", "uniform", "same")
# Sets of inputs and weights: a call's weights were last read three calls ago, and L2 holds 60 MB
TURNS = 4
ROUNDS = 11
LEAST_MS = 1.0  # minimum length of one measurement
LIMIT = 0.02  # largest difference from float32 over the largest value; bf16 rounds three times
Kernel = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class KernelTime:
    """One kernel under one routing: microseconds per call of each round, or the reason why there are none."""

    kernel: str
    source: str
    tokens: int
    us: tuple[float, ...] = ()
    problem: str = ""
    skipped: bool = False
    case: dict[str, Any] | None = None


def larger(t: Tiles) -> int:
    """A number of rows per expert for which our kernel takes the next larger tile; for the largest tile, the next
    smaller one.
    """
    return {16: 17, 64: 129}.get(t.block_m, 128)


@contextlib.contextmanager
def as_if(rows: int) -> Iterator[None]:
    """Our kernel uses the tiles for `rows` rows per expert."""
    chosen = fused_experts.tiles
    fused_experts.tiles = lambda _, dtype, is_wide: tiles(rows, dtype, is_wide)  # type: ignore[assignment]
    try:
        yield
    finally:
        fused_experts.tiles = chosen


def kernels(routing: Routing, tokens: int) -> dict[str, tuple[str, Kernel]]:
    """{name: (description, function)}: ours with its default tiles and with others, and vLLM's if available."""
    rows = tokens * routing.top_k // routing.experts
    now = tiles(rows, torch.bfloat16, wide(torch.device("cuda", torch.cuda.current_device())))
    other = larger(now)
    then = tiles(other, torch.bfloat16, wide(torch.device("cuda", torch.cuda.current_device())))

    def ours_other(*args: Any) -> torch.Tensor:
        with as_if(other):
            return fused_experts.fused_experts(*args, None, False)

    found: dict[str, tuple[str, Kernel]] = {
        "triton": (
            f"blocks of {now.block_m} rows",
            lambda *args: fused_experts.fused_experts(*args, None, False),
        ),
        "triton-other": (f"blocks of {then.block_m} rows", ours_other),
    }
    theirs, version = _vllm()
    if theirs is not None:
        found["vllm"] = (version, theirs)
    return found


def _vllm() -> tuple[Kernel | None, str]:
    """vLLM's function and version, or None and the reason."""
    try:
        import vllm
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return fused_experts, f"vllm {vllm.__version__}"


def why_no_vllm() -> str:
    """Why vLLM's kernel cannot be called; empty if it can."""
    function, what = _vllm()
    return "" if function is not None else what


def measure(
    routing: Routing, tokens: tuple[int, ...], deadline: float, seed: int = 0
) -> Iterator[KernelTime]:
    """Time every kernel, routing and number of tokens, until time.monotonic() reaches `deadline`."""
    shape, device = shape_of(routing.experts, routing.top_k), "cuda"
    del shape["known"]
    hidden, inner = shape["hidden"], shape["intermediate"]
    generator = torch.Generator(device).manual_seed(seed)
    w1 = _weights((TURNS, routing.experts, 2 * inner, hidden), generator)
    w2 = _weights((TURNS, routing.experts, hidden, inner), generator)
    for count in tokens:
        rng = np.random.default_rng(seed + count)
        x = torch.empty(TURNS, count, hidden, dtype=torch.bfloat16, device=device).normal_(
            generator=generator
        )
        inputs: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        cases: dict[str, dict[str, Any]] = {}
        for source in SOURCES:
            made = [batch_of(routing, source, count, turn, rng) for turn in range(TURNS)]
            stats = [load_stats(counts_of(ids, routing.experts)) for ids, _ in made]
            means = {k: float(np.mean([s[k] for s in stats])) for k in ("hit", "max_over_mean")}
            cases[source] = {**shape, "experts_hit": means["hit"], "max_over_mean": means["max_over_mean"]}
            inputs[source] = [
                (x[t], w1[t], w2[t], torch.from_numpy(w).to(device), torch.from_numpy(i).to(device))
                for t, (i, w) in enumerate(made)
            ]
        yield from _at(routing, count, inputs, cases, deadline)


def _weights(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    made = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return made.normal_(0.0, size[-1] ** -0.5, generator=generator)


def _at(
    routing: Routing, count: int, inputs: dict[str, list[Any]], cases: dict[str, dict[str, Any]], deadline: float
) -> Iterator[KernelTime]:  # fmt: skip
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    failed: list[KernelTime] = []
    offered = kernels(routing, count)
    for name, (what, fn) in offered.items():
        for source, sets in inputs.items():
            case = {**cases[source], "kernel": what}
            if time.monotonic() > deadline:
                failed.append(KernelTime(name, source, count, problem="out of time", skipped=True, case=case))
                continue
            try:
                problem = _check(fn, sets[0]) if source != "same" else ""
                if not problem:
                    graphs[name, source] = _graph(fn, sets)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:300]}"
            if problem:
                failed.append(KernelTime(name, source, count, problem=problem, case=case))
    us: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    replays = {key: _replays(graph) for key, graph in graphs.items()}
    for number in range(ROUNDS):
        order = list(graphs)
        for key in order if number % 2 else reversed(order):
            us[key].append(_time(graphs[key], replays[key]))
    for (name, source), found in us.items():
        case = {**cases[source], "kernel": offered[name][0]}
        yield KernelTime(name, source, count, tuple(found), case=case)
    yield from failed


def _check(fn: Kernel, args: tuple[torch.Tensor, ...]) -> str:
    """The problem with the first 32 tokens compared with float32; empty if they are right."""
    x, w1, w2, weights, ids = args
    found = fn(*args)[:32].float()
    want = torch.zeros_like(found)
    for expert in ids[:32].unique().tolist():  # unlike the reference, loop only over the experts that are hit
        gate, up = (x[:32].float() @ w1[expert].float().t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().t()
        want += y * torch.where(ids[:32] == expert, weights[:32], 0.0).sum(dim=1, keepdim=True)
    gap = ((found - want).abs().max() / want.abs().max()).item()
    return "" if gap < LIMIT else f"relative error {gap:.3g} is over {LIMIT}"


def _graph(fn: Kernel, sets: list[Any]) -> torch.cuda.CUDAGraph:
    """One call with each set of inputs, as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets:
            fn(*args)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in sets:
            fn(*args)
    return graph


def _replays(graph: torch.cuda.CUDAGraph) -> int:
    """The number of replays that fills LEAST_MS."""
    _time(graph, 1)
    return max(1, round(LEAST_MS * 1e3 / (TURNS * _time(graph, 2))))


def _time(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Microseconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / (replays * TURNS)
