"""Check collectives on several GPUs and time them against their baselines: see README.md.

collectives.py --out rows.jsonl [--ops all_reduce,all_reduce_rms_norm] [--ranks 2] [--most BYTES]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from experiments.common.results import Results, described, mapped, precise, produced
from fk_bench.core.gpus import check_ranks
from fk_bench.core.rows import Status
from fk_bench.core.terminal.flags import ConfigError

from fastkernels.core import parallel, registry
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.collective.production import BASELINES

CALLS, ROUNDS = 20, 15
HIDDEN = 4096
TOKENS = (1, 2, 8, 32, 64, 128, 256, 1024, 4096, 16384, 65536)  # messages of 8 KiB to 512 MiB in bfloat16


def cases(spec: OpSpec, ranks: int, most: int) -> list[Case]:
    """The op's own model cases; for the plain collectives messages of 4 KiB to `most` bytes too."""
    found = [c for c in spec.cases if "model" in c.tags]
    if set(spec.cases[0].dims) - {"residual"} == {"tokens", "hidden"}:
        rest = {k: v for k, v in found[0].dims.items() if k not in ("tokens", "hidden")}
        sizes = [(1, HIDDEN // 2), *((t, HIDDEN) for t in TOKENS if t * HIDDEN * 2 <= most)]
        found = [Case(f"{t}x{h}", {"tokens": t, "hidden": h, **rest}) for t, h in sizes]
    return [dataclasses.replace(c, dims={**c.dims, spec.ranks: ranks}) for c in found]


def arguments(spec: OpSpec, case: Case, ranks: int) -> list[list[Any]]:
    """Arguments of every rank, the same in all ranks where the op declares it."""
    every = [spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(r)) for r in range(ranks)]
    for args in every:
        args[spec.position("group")] = parallel.TP
        for i, argument in enumerate(spec.arguments):
            if argument.name in spec.replicated and isinstance(every[0][i], torch.Tensor):
                args[i] = every[0][i].clone()
    return every


def wanted(spec: OpSpec, every: list[list[Any]], rank: int) -> list[torch.Tensor]:
    lists = [
        list(v) if isinstance(v[0], torch.Tensor) else v[0] for v in zip(*map(precise, every), strict=True)
    ]
    found = spec.reference(*lists)[rank]
    return [t for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, torch.Tensor)]


def problem(
    spec: OpSpec, case: Case, fn: Callable[..., Any], args: list[Any], want: list[torch.Tensor]
) -> str:
    used = mapped(args, torch.clone)
    got = produced(spec, used, fn(*used))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        limit = spec.tolerance_for(case, g.dtype)
        error = (g.double() - w.double()).abs()
        share = (error / (limit.atol + limit.rtol * w.double().abs())).nan_to_num(torch.inf)
        share[error == 0] = 0.0
        if share.numel() and share.max() > 1:
            return f"output {i}: {share.max().item():.3g} times the tolerance"
    return ""


def captured(fn: Callable[..., Any], args: list[Any], around: Any) -> torch.cuda.CUDAGraph:
    used = mapped(args, torch.clone)
    for _ in range(3):
        fn(*used)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with around, torch.cuda.graph(graph):
        for _ in range(CALLS):
            fn(*used)
    graph.kept = used  # type: ignore[attr-defined]
    graph.replay()
    torch.cuda.synchronize()
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median time of a call, the maximum over the ranks, of interleaved replays."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            worst = torch.tensor(1e3 * start.elapsed_time(end) / CALLS, device="cuda")
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            times[name].append(worst.item())
    return {name: statistics.median(found) for name, found in times.items()}


def ways(spec: OpSpec, args: list[Any]) -> dict[str, tuple[Callable[..., Any], Any, str]]:
    """Label: (function, context of a capture, why it cannot run). Our providers, then the baselines."""
    found: dict[str, tuple[Callable[..., Any], Any, str]] = {}
    for provider in spec.op.providers:
        if provider.name in ("reference", "alone") or provider.unavailable("cuda"):
            continue
        reason = provider.supports(*args) if provider.supports else None
        for params in provider.params or ({},):
            if provider.fits is None or reason or provider.fits(params, *args):
                label = " ".join([provider.name, *(f"{k}={v}" for k, v in params.items())])
                found[label] = (partial(provider.fn, **params), contextlib.nullcontext(), str(reason or ""))
    for baseline in BASELINES[spec.name]:
        if baseline.available() or baseline.name in (p.name for p in spec.op.providers):
            continue
        reason = baseline.supports(*args)
        around = getattr(baseline.fn, "capturing", contextlib.nullcontext)
        found[baseline.name] = (baseline.fn, around(), str(reason or ""))
    return found


def examine(results: Results | None, spec: OpSpec, case: Case, rank: int, ranks: int) -> None:
    every = arguments(spec, case, ranks)
    args, want = every[rank], wanted(spec, every, rank)
    graphs, verdicts = {}, {}
    for name, (fn, around, reason) in ways(spec, args).items():
        if reason:
            verdicts[name] = (reason, Status.UNSUPPORTED)
            continue
        try:
            wrong = problem(spec, case, fn, args, want)
            graphs[name] = captured(fn, args, around)
            verdicts[name] = (wrong, Status.WRONG if wrong else Status.OK)
        except Exception:
            verdicts[name] = (traceback.format_exc(limit=-3), Status.FAILED)
        agreed: list[Any] = [None] * ranks
        dist.all_gather_object(agreed, verdicts[name])
        verdicts[name] = next((v for v in agreed if v[1] != Status.OK), verdicts[name])
        if verdicts[name][1] == Status.FAILED:
            graphs.pop(name, None)
    times = microseconds(graphs)
    if results is None:
        return
    link = spec.traffic(case) if spec.traffic is not None else 0
    line = []
    for name, (reason, status) in verdicts.items():
        metrics = {"time_us_p50": times[name]} if name in times else {}
        if link and metrics:
            metrics["bus_gb_per_s"] = link / metrics["time_us_p50"] / 1e3
        results.add(spec.name, name, described(case), reason, status, **metrics)
        line.append(f"{name} {times[name]:.2f}" if name in times else f"{name} -")
        if status in (Status.WRONG, Status.FAILED):
            line.append(f"{status.value}: {reason.splitlines()[-1][:150]}")
    print(f"{spec.name} {case.name}: {'; '.join(line)}", flush=True)


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.cuda.set_device(rank)
    parallel.init(rank, options.ranks, f"file://{store}", device=f"cuda:{rank}", timeout=60.0)
    results = Results("collectives", options.out) if rank == 0 else None
    for name in options.ops.split(",") if options.ops else registry.collective_names():
        spec = registry.get(name)
        for case in cases(spec, options.ranks, options.most):
            examine(results, spec, case, rank, options.ranks)
    if results is not None:
        print(f"{results.wrong} wrong", flush=True)
    parallel.reset()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, default=32 << 20, help="bytes, at most 512 MiB: 536870912")
    options = parser.parse_args()
    try:
        check_ranks("--ranks", options.ranks, torch.cuda.device_count(), on_gpus=True)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
