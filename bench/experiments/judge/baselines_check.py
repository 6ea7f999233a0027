"""Try every baseline of every op on this GPU: is it installed, does it support the op's cases, is it right, how fast?

    baselines_check.py --out rows.jsonl [--ops rms_norm,...] [--only vllm,...] [--seconds 75]
        [--prepend sglang=/where/sglang/is]

Prints a line for each (op, baseline) and writes a row for each case. A result is right within four times the op's
tolerance of float64 (float32 for large cases), if no argument is mutated without being declared. Times are medians of
replayed CUDA graphs of 20 calls on warm inputs next to other processes: use them as hints only. After --seconds the
remaining baselines are reported as not reached. A failure never ends the run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.results import Results, described, mapped, outputs, precise, produced
from fk_bench.core.baselines import Baseline, baselines
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.memory.slots import written_arguments

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec

CALLS, REPLAYS, WIDER = 20, 7, 4.0
# One process each, in parallel: a crash or a broken CUDA context affects only its own baselines.
GROUPS = (
    "vllm,vllm-static,vllm-weighted,fa3",
    "cublas,torch,transformers,fla,deepgemm,reference",
    "sgl_kernel",
    "inductor",
    "flashinfer",
    "sglang",
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def wrong(
    spec: OpSpec, case: Case, b: Baseline, fn: Callable[..., Any], args: list[Any]
) -> tuple[str, float]:
    """Return (problem or '', the largest error relative to the tolerance)."""
    used = mapped(args, torch.clone)
    got = produced(spec, used, fn(*used))
    torch.cuda.synchronize()
    for i, (before, after) in enumerate(zip(args, used, strict=True)):
        if (
            not isinstance(before, torch.Tensor)
            or i in written_arguments(spec)
            or i in b.overwrites
            or not before.numel()
        ):
            continue
        if not same_bits(before, after):
            return f"argument {i} was overwritten", 0.0
    want = outputs(spec, precise(args))
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}", 0.0
    worst = 0.0
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape:
            return f"output {i} has shape {tuple(g.shape)}, not {tuple(w.shape)}", worst
        if i in b.unchecked or not g.numel():
            continue
        if not g.is_floating_point():
            if not torch.equal(g.long(), w.long()):
                return f"output {i} differs in {int((g.long() != w.long()).sum())} of {g.numel()}", worst
            continue
        limit = spec.tolerance_for(case, g.dtype)
        error = (g.double() - w.double()).abs()
        allowed = limit.atol + limit.rtol * w.double().abs()
        share = torch.where(error == 0, 0.0, error / allowed).nan_to_num(torch.inf, torch.inf).max().item()
        worst = max(worst, share)
        if share > WIDER:
            return f"output {i}: error {error.max().item():.3g}, {share:.3g} times the tolerance", worst
    return "", worst


def microseconds(b: Baseline, fn: Callable[..., Any], args: list[Any]) -> float:
    """Return the median time of a call, in a CUDA graph if it can be captured."""
    used = mapped(args, torch.clone)
    for _ in range(3):
        fn(*used)
    torch.cuda.synchronize()
    run: Callable[[], Any] = lambda: [fn(*used) for _ in range(CALLS)]  # noqa: E731
    if b.graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def examine(results: Results, op: str, b: Baseline, deadline: float) -> str:
    """Return a line of text about one baseline on all cases of its op."""
    missing = b.available()
    if missing:
        return f"missing: {missing}"
    begin = time.monotonic()
    fn = b.ready()
    made = time.monotonic() - begin
    spec, right, times, worst = registry.get(op), 0, [], 0.0
    said: dict[str, list[str]] = {}  # what: names of cases

    def say(what: str) -> None:
        said.setdefault(what, []).append(case.name)

    for case in sorted(spec.cases, key=lambda c: "odd" in c.tags):
        if time.monotonic() > deadline:
            say("time limit reached; later cases too")
            break
        try:
            args = spec.inputs(case, "cuda", torch.Generator("cuda").manual_seed(0))
            refused = b.supports(*args)
            if refused:
                results.add(op, b.name, described(case), refused, Status.UNSUPPORTED)
                say("refused")
                continue
            problem, share = wrong(spec, case, b, fn, args)
            worst = max(worst, share)
            if problem:
                results.add(op, b.name, described(case), problem)
                say(f"WRONG {problem}")
                continue
            right += 1
            metrics = {"error_share": share}
            if "model" in case.tags:
                metrics["time_us_p50"] = microseconds(b, fn, args)
                times.append(f"{case.name} {metrics['time_us_p50']:.1f}")
            results.add(op, b.name, described(case), **metrics)
        except Exception as error:
            results.add(op, b.name, described(case), traceback.format_exc(limit=-3), Status.FAILED)
            say(f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:140]}")
    note = f" (outputs {b.unchecked} not compared)" if b.unchecked else ""
    parts = [f"{right} of {len(spec.cases)} right, error {worst:.2g} tol{note}, made in {made:.1f} s"]
    parts += [f"us: {', '.join(times)}"] if times else []
    return "; ".join([*parts, *(f"{what} ({', '.join(names)})" for what, names in said.items())])


def children(options: argparse.Namespace) -> int:
    """Run each group in its own process and print their output in order."""
    command = [sys.executable, __file__, "--out", str(options.out), "--seconds", str(options.seconds)]
    command += ["--ops", options.ops] if options.ops else []
    started, failed = [], 0
    for group in GROUPS:
        paths = [
            path for name, path in (p.split("=", 1) for p in options.prepend) if name in group.split(",")
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        }
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read below
        child = subprocess.Popen(
            [*command, "--only", group], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        started.append((group, child, log))
    end = time.monotonic() + options.seconds + 60
    for group, child, log in started:
        try:
            status = child.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if options.verbose or line.startswith("| ")]
        print(
            f"--- {group}: exit status {status}",
            *(lines if status == 0 else log_tail(log)),
            sep="\n",
            flush=True,
        )
        failed += status != 0
    return failed


def log_tail(log: Any) -> list[str]:
    log.seek(0)
    return log.read().splitlines()[-40:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", help="comma-separated; all by default")
    parser.add_argument("--only", help="comma-separated names of baselines, in this process")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument(
        "--prepend",
        action="append",
        default=[],
        help="NAME=DIRECTORY: first on PYTHONPATH for NAME's process; repeatable",
    )
    parser.add_argument("--verbose", action="store_true", help="also print output of the libraries")
    options = parser.parse_args()
    if not options.only:
        raise SystemExit(1 if children(options) else 0)
    deadline = time.monotonic() + options.seconds
    only = options.only.split(",")
    results = Results("baselines_check", options.out)
    with torch.inference_mode():
        for op in options.ops.split(",") if options.ops else registry.op_names():
            for b in (b for b in baselines(op, "production", "cuda") if b.name in only):
                begin = time.monotonic()
                try:
                    text = examine(results, op, b, deadline) if begin < deadline else "not reached"
                except Exception as error:
                    results.wrong += 1
                    text = f"FAILED {type(error).__name__}: {str(error)[:300]}"
                print(
                    f"| {op:<18} {b.name:<11} {b.kind:<9} {time.monotonic() - begin:4.1f} s  {text}",
                    flush=True,
                )
    print(f"| {results.wrong} wrong or failed")


if __name__ == "__main__":
    main()
