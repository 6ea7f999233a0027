"""Check our recurrences on a GPU and time them against their baselines: see README.md.

recurrences.py --out rows.jsonl [--ops ssd,kda] [--seconds 420] [--crossover | --compare] [--device cpu]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.results import Results, described, mapped, outputs, precise, produced
from fk_bench.core.rows import Status

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.recurrence import cases
from fastkernels.overrides.recurrence.kernels import chunks, linear_chunks, recurrent
from fastkernels.overrides.recurrence.kernels.problem import DELTA, LINEAR, Problem
from fastkernels.overrides.recurrence.production import BASELINES

# By importance: an exhausted time limit cuts the last ones.
OPS = "gated_delta_rule", "ssd", "causal_conv1d", "gated_linear_attention", "kda", "rwkv7", "mamba_scan"
PEAK = 4.8e12  # bytes a second of an H200
CALLS, REPLAYS = 10, 7
WIDER = 2.0  # times the op's tolerance, for sums of thousands of tokens in bfloat16


def problem(spec: OpSpec, case: Case, fn: Callable[..., Any], args: list[Any], want: list[torch.Tensor],
            unchecked: tuple[int, ...] = ()) -> str:  # fmt: skip
    """Return '' if the results are right, else what is wrong."""
    used = mapped(args, torch.clone)
    for i, (g, w) in enumerate(zip(produced(spec, used, fn(*used)), want, strict=True)):
        limit = spec.tolerance_for(case, g.dtype)
        error = (g.double() - w.double()).abs()
        share = (error / (limit.atol + limit.rtol * w.double().abs())).nan_to_num(torch.inf)
        if i not in unchecked and share.numel() and share.max() > WIDER:
            return f"output {i}: error {error.max().item():.3g}, {share.max().item():.3g} times the tolerance"
    return ""


def microseconds(fn: Callable[..., Any], args: list[Any]) -> float:
    """Return the median time of a call in a CUDA graph."""
    used = mapped(args, torch.clone)
    for _ in range(3):
        fn(*used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            fn(*used)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def ours_of(spec: OpSpec) -> Callable[..., Any]:
    return next(p.fn for p in spec.op.providers if p.name == "triton")


def examine(results: Results, spec: OpSpec, device: str, deadline: float) -> None:
    timed = device == "cuda"
    ratios: dict[str, list[float]] = {}
    print(f"\n{spec.name}", flush=True)
    for baseline in BASELINES[spec.name]:
        if reason := baseline.available():
            print(f"  {baseline.name}: {reason}")
    for case in sorted(spec.cases, key=lambda c: "odd" not in c.tags):
        if time.monotonic() > deadline or ("odd" not in case.tags and not timed):
            break
        if not timed and case.dtype == "bfloat16":  # the interpreter truncates it
            case = dataclasses.replace(case, dtype="float16")
        args = spec.inputs(case, device, torch.Generator(device).manual_seed(0))
        want = outputs(spec, precise(args))
        try:
            wrong = problem(spec, case, ours_of(spec), args, want)
        except Exception:
            wrong = traceback.format_exc(limit=-2)
        if wrong or "model" not in case.tags:
            results.add(spec.name, "triton", described(case), wrong)
            if wrong:
                print(f"  {case.name}: WRONG {wrong}", flush=True)
            continue
        ours, floor = microseconds(ours_of(spec), args), 1e6 * spec.bytes_moved(case) / PEAK
        results.add(spec.name, "triton", described(case), time_us_p50=ours, floor_share=floor / ours)
        line, best = [f"  {case.name:24s} {ours:9.1f} us, {floor / ours:4.0%} of the floor"], float("inf")
        for baseline in BASELINES[spec.name]:
            if baseline.available() or time.monotonic() > deadline:
                continue
            refused = baseline.supports(*args)
            if refused:
                results.add(spec.name, baseline.name, described(case), refused, Status.UNSUPPORTED)
                continue
            try:
                wrong = problem(spec, case, baseline.fn, args, want, baseline.unchecked)
                taken = microseconds(baseline.fn, args)
                best = min(best, taken)
                results.add(spec.name, baseline.name, described(case), wrong, time_us_p50=taken)
                line.append(
                    f"{baseline.name} {taken:.1f} ({taken / ours:.2f}){' WRONG ' + wrong if wrong else ''}"
                )
            except Exception as error:
                results.add(
                    spec.name, baseline.name, described(case), traceback.format_exc(limit=-3), Status.FAILED
                )
                line.append(f"{baseline.name} FAILED {type(error).__name__}: {str(error)[:80]}")
        if best < float("inf"):
            ratios.setdefault("decode" if "decode" in case.name else "prefill", []).append(best / ours)
        print("; ".join(line), flush=True)
    for kind, found in ratios.items():
        print(f"  {kind}: {statistics.geometric_mean(found):.2f} times the best baseline, {len(found)} cases")


def crossover(results: Results, deadline: float) -> None:
    """Time both kinds of kernels for eight sequences of few tokens, heads of 128."""
    for name, rule, channels in (
        ("gated_delta_rule", DELTA, False),
        ("kda", DELTA, True),
        ("gla", LINEAR, True),
    ):
        for tokens in (8, 16, 24, 32, 48, 64, 128):
            if time.monotonic() > deadline:
                return
            spec = registry.get("kda" if channels else "gated_delta_rule")
            dims = cases.prompts(*(tokens,) * 8, key_heads=32, heads=32, dk=128, dv=128)
            case = Case(f"{name}_{tokens}", dims)
            q, k, v, g, beta, *tail = spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(0))[:9]
            p = Problem(q, k, v, g, *tail, rule, beta=beta)
            out = torch.empty_like(v)
            ways = {"tokens": recurrent.run, "chunks": chunks.run}
            times = {way: microseconds(partial(run, p, out), []) for way, run in ways.items()}
            print(name, tokens, {way: round(t, 1) for way, t in times.items()}, flush=True)
            for way, t in times.items():
                results.add(name, way, described(case), time_us_p50=t)


def with_tile(module: Any, name: str, **tile: int) -> Callable[[], AbstractContextManager[Any]]:
    """Another tile of a kernel, for a while."""
    return partial(mock.patch.object, module, name, lambda p: tile)


def with_way(run: Callable[..., None]) -> Callable[[], AbstractContextManager[Any]]:
    """All prompts by this function, for a while."""
    return partial(mock.patch.object, chunks, "way_of", lambda p: run)


LINEAR_WAYS = {
    "segments": with_way(linear_chunks.run),
    "whole": with_way(partial(linear_chunks.run, segment=0)),
    "halves": with_way(lambda p, out: linear_chunks.run(p, out, 64 * -(-len(p.v) // 128))),
    "sixths": with_way(lambda p, out: linear_chunks.run(p, out, 64 * -(-len(p.v) // 384))),
    "products by head": partial(mock.patch.object, linear_chunks, "shares", lambda p: False),
    "warps 8": with_tile(linear_chunks, "tile_of", num_stages=2, num_warps=8),
    "stages 3": with_tile(linear_chunks, "tile_of", num_stages=3, num_warps=4),
}
PRODUCT_WAYS = {
    f"{keys} keys, {warps} warps": with_tile(chunks, "products_tile", BLOCK_K=keys, num_warps=warps)
    for keys, warps in ((32, 4), (32, 8), (64, 4), (64, 8))
}
# (op, its model cases by the beginning of their names, other ways), by importance
COMPARED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ssd", "mamba2", LINEAR_WAYS),
    ("kda", "kimi_linear", PRODUCT_WAYS),
    (
        "gated_delta_rule",
        "qwen3_next",
        {way: PRODUCT_WAYS[way] for way in ("32 keys, 4 warps", "64 keys, 8 warps")},
    ),
    (
        "gated_linear_attention",
        "gla",
        {way: PRODUCT_WAYS[way] for way in ("64 keys, 4 warps", "32 keys, 8 warps")},
    ),
    ("gated_linear_attention", "retnet", {way: LINEAR_WAYS[way] for way in ("segments", "whole")}),
    ("causal_conv1d", "", {}),
)


def compare(results: Results, names: list[str], device: str, deadline: float) -> None:
    """Time "old" kernels of prompts (before 2026-11-30), "new" ones, their variants, and baselines."""
    for name, begins, variants in COMPARED:
        if name not in names:
            continue
        spec = registry.get(name)
        ways: dict[str, Any] = {"new": nullcontext, **variants}
        if variants:
            ways = {"old": with_way(partial(chunks.run, halved=True)), **ways}
        print(f"\n{name}, {begins}: us, and in brackets the time of new divided by it", flush=True)
        for case in sorted(spec.cases, key=lambda c: "decode" in c.name):
            if "model" not in case.tags or not case.name.startswith(begins) or time.monotonic() > deadline:
                continue
            decode = "decode" in case.name
            args = spec.inputs(case, device, torch.Generator(device).manual_seed(0))
            want = outputs(spec, precise(args))
            taken: dict[str, float] = {}
            rows = {
                way: (ours_of(spec), (), made) for way, made in ways.items() if not decode or way == "new"
            }
            for baseline in BASELINES[name]:
                if not baseline.available() and not baseline.supports(*args):
                    rows[baseline.name] = baseline.fn, baseline.unchecked, nullcontext
            for way, (fn, unchecked, made) in rows.items():
                if time.monotonic() > deadline:
                    break
                try:
                    with made():
                        wrong = problem(spec, case, fn, args, want, unchecked)
                        taken[way] = microseconds(fn, args)
                    results.add(name, way, described(case), wrong, time_us_p50=taken[way])
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"[:200]
                    results.add(name, way, described(case), traceback.format_exc(limit=-3), Status.FAILED)
                if wrong:
                    print(f"  {case.name} {way}: WRONG {wrong}", flush=True)
            own = taken.get("new", float("nan"))
            print(
                f"  {case.name:22s}",
                "; ".join(f"{w} {t:.1f} ({own / t:.2f})" for w, t in taken.items()),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    results, deadline = Results("recurrences", options.out), time.monotonic() + options.seconds
    if options.compare:
        compare(results, options.ops.split(","), options.device, deadline)
    elif options.crossover:
        crossover(results, deadline)
    else:
        for name in options.ops.split(","):
            examine(results, registry.get(name), options.device, deadline)
    print(f"{results.wrong} wrong")
    sys.exit(bool(results.wrong))


if __name__ == "__main__":
    main()
