"""Check our recurrences on a GPU and time them against their baselines: see README.md.

recurrences.py --out rows.jsonl [--ops ssd,kda] [--seconds 420] [--crossover] [--device cpu]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.results import Results, described, mapped, outputs, precise, produced
from fk_bench.core.rows import Status

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.recurrence import cases, chunks, recurrent
from fastkernels.overrides.recurrence.problem import DELTA, LINEAR, Problem
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--crossover", action="store_true")
    options = parser.parse_args()
    results, deadline = Results("recurrences", options.out), time.monotonic() + options.seconds
    if options.crossover:
        crossover(results, deadline)
    else:
        for name in options.ops.split(","):
            examine(results, registry.get(name), options.device, deadline)
    print(f"{results.wrong} wrong")
    sys.exit(bool(results.wrong))


if __name__ == "__main__":
    main()
