"""Time every parameter set of an op at the layer shapes of many models: the points of the selection model.

    sweep.py --out points.jsonl --op linear,linear_fp8,attention_decode,fused_experts,fused_experts_fp8
        [--seconds 300] [--tokens 1,8,16,32,64] [--scales row,block] [--batch 1,8,32,64] [--context 256,1024,4096]
        [--compile-only]

Compiles in parallel, checks each kernel against the op's reference on its first use of a shape, and times it against
the host's kernel in CUDA graphs over memory that exceeds L2, in three interleaved rounds. The same command continues a
run that reached its time limit: points that the file has are not measured again. A row has a provider's times at a
point, as metrics {parameters in JSON: microseconds}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, finish, rounds
from experiments.selection.calls import Point, Subject, provider, subjects

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.launch import tickets
from fastkernels.overrides.kit.selection import Candidate

ROUNDS, COMPILE_S = 3, 240


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def compile_share(subject: Subject, tokens: list[int], part: int, parts: int) -> None:
    """Compile every `parts`-th kernel."""
    chip = Chip.of("cuda")
    found: dict[Any, tuple[Point, Candidate]] = {}
    for point in subject.points(tokens):
        for candidate in subject.candidates(point, chip):
            found.setdefault(subject.kernel(point, candidate), (point, candidate))
    for point, candidate in list(found.values())[part::parts]:
        with contextlib.suppress(Exception):  # reported where it runs
            subject.compiled(point, candidate)


def measure(run: Run, subject: Subject, point: Point, chip: Chip) -> None:
    """Write the microseconds of each right candidate and of the host's kernels."""
    for handed_out in (tickets.captured, tickets.streams):
        handed_out.clear()  # the previous point's graphs are gone
    calls = subject.calls(run, point)
    want = subject.reference(*calls[0]).double()
    case = {"models": point.models, "shape": point.shape, "sizes": point.sizes}
    todo: dict[str, Any] = {}
    named: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in subject.hosts:
        host = provider(subject.op, name)
        if host.unavailable("cuda") is None and (host.supports is None or host.supports(*calls[0]) is None):
            named[name] = (name, {})
    for candidate in subject.candidates(point, chip):
        label = f"{candidate.provider} {json.dumps(candidate.params)}"
        named[label] = (candidate.provider, dict(candidate.params))
    for label, (name, params) in list(named.items()):
        call = partial(provider(subject.op, name).fn, **params)
        try:
            error = ((call(*calls[0]).double() - want).norm() / want.norm()).item()
            reason = "" if error <= subject.error else f"relative error {error:.3g}"
        except Exception as found:
            reason = f"{type(found).__name__}: {str(found)[:200]}"
        if reason:
            run.row("time", name, {**case, "params": params}, reason)
            if "CUDA error" in reason or "CUDA_ERROR" in reason:
                raise SystemExit("the GPU's context is lost: nothing more can be measured")
        else:
            todo[label] = [partial(call, *args) for args in calls]
    times = {label: [us / len(calls) for us in each] for label, each in rounds(run, todo, ROUNDS).items()}
    median = {label: statistics.median(each) for label, each in times.items()}
    made: dict[str, dict[str, float]] = {}  # {provider: {parameters: us}}
    for label, us in median.items():
        name, params = named[label]
        made.setdefault(name, {})[json.dumps(params)] = round(us, 4)
    for name, sets in made.items():
        run.row("time", name, case, quiet=True, **sets)
    best = min(median, key=median.__getitem__)
    where = " ".join(map(str, (*point.shape.values(), *point.sizes.values())))
    print(f"{point.models[0]:<26} {where:<40} {median[best]:8.2f} us {best}", flush=True)


def done(out: Path) -> set[str]:
    """Return the points that a file has."""
    lines = out.read_text().splitlines() if out.exists() else []
    cases = [row["case"] for row in map(json.loads, lines) if row["case"]["kind"] == "time"]
    return {json.dumps([case["shape"], case["sizes"]]) for case in cases if "shape" in case}


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--op", default="linear")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", default="1,8,16,32,64")
    parser.add_argument("--scales", default="row,block")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--context", default="256,1024,4096")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # of its own children
    options = parser.parse_args()
    known = subjects(options.scales.split(","), numbers(options.batch), numbers(options.context))
    ops, tokens = options.op.split(","), numbers(options.tokens)
    if unknown := set(ops) - set(known):
        parser.error(f"--op {unknown.pop()!r}: known: {', '.join(known)}")
    torch.set_grad_enabled(False)
    if options.compile:
        for op in ops:
            compile_share(known[op], tokens, *map(int, options.compile.split("/")))
        return
    begin, parts = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, __file__, *sys.argv[1:]]
    workers = [subprocess.Popen([*command, "--compile", f"{i}/{parts}"]) for i in range(parts)]
    lost = finish(workers, COMPILE_S if options.compile_only else min(COMPILE_S, options.seconds / 2))
    print(*lost, f"compiled in {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    if options.compile_only:
        return
    wrong, chip, before = 0, Chip.of("cuda"), done(options.out)
    for op in ops:
        run = Run("selection/sweep.py", op, options)
        run.end, run.common["baseline"] = begin + options.seconds, known[op].hosts[0]
        for point in known[op].points(tokens):
            if json.dumps([point.shape, point.sizes]) in before:
                continue
            if run.left() <= 0:
                raise SystemExit(f"time limit at {op} {point}: the same command goes on")
            measure(run, known[op], point, chip)
        wrong += run.wrong
    print(f"{wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
