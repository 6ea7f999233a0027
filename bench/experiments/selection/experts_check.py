"""Check and time the choices for experts as a patch makes them, next to vLLM's fused_experts: `--out rows.jsonl`.

    experts_check.py --out rows.jsonl [--seconds 180] [--tokens 1,8,32,64,2048] [--kinds bf16,row,block,tensor]

For each mixture of models.py, number of tokens and kind of weights: the proposals, each compared with vLLM's result,
and their times in CUDA graphs, by turns with vLLM's kernels, on weights that L2 does not hold. Routing is uniform and
skewed by turns. A row `choice` has the microseconds of a call (vLLM's fastest kernel, ours, ours by default) and the
ratio with its 95% interval; the summary says where ours would run, and the mean ratio by number of tokens. Points are
measured in order of importance until the time is over. Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

import torch
from experiments.common.graph_clock import Run, finish
from experiments.selection import experts
from experiments.selection.experts import Point

from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import Candidate
from fastkernels.verify import measure
from fastkernels.verify.measure import Live, Ratio, Subject

HOSTS = ("vllm", "cutlass", "deepgemm")
ROUNDS, COMPILE_S = 30, 90


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def all_points(tokens: list[int], kinds: list[str]) -> list[Point]:
    """Return the points, few tokens and bfloat16 first."""
    made = []
    for m in tokens:
        for kind in kinds:
            made += experts.points([m], None if kind == "bf16" else [kind])
    return made


def measured_point(point: Point) -> measure.Point:
    values = (*list(point.shape.values())[:-1], torch.bfloat16)
    live = Live(lambda sizes, count, generator: [])  # the calls are made once, for all subjects
    return measure.Point(experts.op_of(point).name, values, tuple(point.sizes.values()), (), live)


def compile_share(points: list[Point], part: int, parts: int) -> None:
    """Compile every `parts`-th kernel of the proposals."""
    chip, found = Chip.of("cuda"), {}
    for point in points:
        for subject in measure.proposals(measured_point(point), "cuda", chip):
            params = dict(subject.params)
            candidate = Candidate(subject.provider.name, params, "", (), tuple(params.values()))
            found.setdefault(experts.kernel_of(point, candidate), (point, candidate))
    for point, candidate in list(found.values())[part::parts]:
        with contextlib.suppress(Exception):  # reported where it runs
            experts.compiled(point, candidate)


def check(run: Run, point: Point, chip: Chip) -> float | None:
    """Write the row of a point; return the ratio of vLLM's time to ours, None if nothing was compared."""
    op = experts.op_of(point)
    calls = [list(call) for call in experts.calls(run, point)]
    case = {"models": point.models, "shape": point.shape, "sizes": point.sizes}
    hosts = []
    for name in HOSTS:
        provider = next((p for p in op.providers if p.name == name), None)
        if provider is None or provider.unavailable(run.device) is not None:
            continue
        if provider.supports is None or provider.supports(*calls[0]) is None:
            # Without the check of ids that our provider adds: these are valid.
            hosts.append(Subject(replace(provider, fn=getattr(provider.fn, "__wrapped__", provider.fn)), {}))
    if not hosts:
        run.row("choice", "triton", case, "vLLM has no kernel for this call here", "unsupported")
        return None
    mine = measured_point(point)
    right: list[Subject] = []
    default = Subject(next(p for p in op.providers if p.name == "triton"), {})
    for subject in (*measure.proposals(mine, run.device, chip), default):
        if any(subject.name == other.name for other in right):
            continue
        reason = measure.wrong(mine, subject, hosts[0], calls[0])
        if reason is None:
            right.append(subject)
        else:
            run.row("choice", subject.provider.name, {**case, "params": dict(subject.params)}, reason)
    if not right:
        return None
    times = measure.interleaved([*hosts, *right], calls, torch.device(run.device), ROUNDS)
    best = min(range(len(hosts)), key=lambda i: statistics.median(times[i]))
    theirs, ours = times[best], times[len(hosts) :]
    fastest = min(range(len(right)), key=lambda i: statistics.median(ours[i]))
    ratio = Ratio.of(ours[fastest], theirs)
    named = zip((*hosts, *right), times, strict=True)
    us = {f"{s.name} us": round(1e6 * statistics.median(t) / len(calls), 2) for s, t in named}
    winner, interval = right[fastest], (round(ratio.low, 4), round(ratio.high, 4))
    about = {"baseline": hosts[best].name, "params": dict(winner.params), "ours": ratio.low > 1}
    run.row(
        "choice", winner.provider.name, {**case, **about}, ci95={"ratio": interval}, quiet=True,
        ratio=round(ratio.value, 4), **us,
    )  # fmt: skip
    model, kind = point.models[0].partition(":")[0], point.shape.get("block", "bf16")
    where = f"{model:<15} {kind!s:<5} {point.sizes['tokens']:>5}"
    said = f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {hosts[best].name}"
    print(f"{where}  {said}  {winner.name}", flush=True)
    return ratio.value if ratio.low > 1 else 1.0


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--tokens", default="1,8,32,64,2048")
    parser.add_argument("--kinds", default="bf16,block,row")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # of its own children
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.kinds.split(",")) - {"bf16", *experts.SCALES}:
        parser.error(f"--kinds {unknown.pop()!r}: known: bf16, {', '.join(experts.SCALES)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    todo = all_points(numbers(options.tokens), options.kinds.split(","))
    if options.compile:
        compile_share(todo, *map(int, options.compile.split("/")))
        return
    chip, begin = Chip.of("cuda"), time.monotonic()
    parts = max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, __file__, *sys.argv[1:]]
    children = [subprocess.Popen([*command, "--compile", f"{i}/{parts}"]) for i in range(parts)]
    print(*finish(children, COMPILE_S), f"compiled in {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
    run = Run("selection/experts_check.py", "fused_experts", options)
    run.end, run.common["baseline"] = begin + options.seconds, "vllm"
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    left = 0
    with torch.inference_mode():
        for point in todo:
            if run.left() <= 0:
                left += 1
                continue
            run.op = experts.op_of(point).name
            try:
                found = check(run, point, chip)
            except torch.OutOfMemoryError as error:
                where = {"shape": point.shape, "sizes": point.sizes}
                run.row("choice", "triton", where, str(error)[:200], "failed")
                found = None
            torch.cuda.empty_cache()
            if found is not None:
                kind = "bf16" if "block" not in point.shape else "fp8"
                ratios[kind, point.sizes["tokens"]].append(found)
    for (kind, tokens), several in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, several)))
        print(
            f"{kind} {tokens} tokens: {mean:.3f} in the mean of {len(several)}, the host's where it is faster"
        )
    print(f"{run.wrong} wrong, {left} points left, {time.monotonic() - begin:.0f} s", flush=True)
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
