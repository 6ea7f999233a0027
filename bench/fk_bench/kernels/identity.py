"""The judge's resolution: the baseline's own kernel as the candidate, on both sides. Every speedup should be 1."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fk_bench.core.rows import Row, Status, append
from fk_bench.kernels import report
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.correctness.cases import Trial, trials

INSIDE = 0.95  # share of the intervals that include 1
UNSTEADY = 0.1  # share of the cases without a speedup because the machine was busy
PREFERRED = ("decode_32", "qkv_32")  # a call of production that is neither tiny nor large


def run_identity(names: Sequence[str], options: Options, out: Path, quiet: bool = False) -> dict[str, Any]:
    """Judge the baselines of these ops against themselves, one case an op, or those that `options.names` has.

    Ops without a function are left out. Writes each row to `out`, and a line to standard error. Returns {ok, ops,
    cases, timed, inside, outside, unsteady, left_out, mean, low, high, seconds}: `inside` counts the intervals that
    include 1, `left_out` the cases that cannot be timed for another reason than a busy machine.
    """
    start, rows = time.perf_counter(), list[Row]()
    options = dataclasses.replace(options, identity=True, timed=True)
    with Judge({}, options) as judge:
        for name in names:
            spec = registry.get(name)
            if spec.op is None:
                continue
            found = trials(spec, options.cases, options.device, options.names, options.captures)
            for trial in found if options.names else _one(found, spec, options.device):
                row = judge.case(name, trial)
                append(out, [row])
                rows.append(row)
                if not quiet:
                    print(report.line(row), file=sys.stderr, flush=True)
    return summary(rows) | {"seconds": round(time.perf_counter() - start, 1)}


def _one(found: Sequence[Trial], spec: Any, device: str) -> list[Trial]:
    """The case that stands for an op: a preferred one, else one of a model; on a CPU one of medium size."""
    here = [t for t in found if t.timed and (device == "cuda" or t.gpu_only(spec) is None)]
    if device == "cpu":
        return sorted(here, key=lambda t: spec.flops(t.case) + spec.bytes_moved(t.case))[len(here) // 2 :][:1]
    models = [t for t in here if "model" in t.case.tags] or here
    return [t for t in models if t.case.name in PREFERRED][:1] or models[:1]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The counts of these rows, and whether the judge resolves what it must."""
    timed = [r for r in rows if "speedup" in r.ci95]
    steady = [r for r in rows if r.status is Status.OK]
    outside = [r for r in timed if not r.ci95["speedup"][0] <= 1 <= r.ci95["speedup"][1]]
    unsteady = [r for r in steady if "speedup" not in r.ci95]
    logs = [math.log(r.metrics["speedup"]) for r in timed]
    inside = len(timed) - len(outside)
    enough = inside >= min(INSIDE * len(timed), len(timed) - 1)  # one of few may be outside by chance
    return {
        "ok": bool(timed) and enough and len(unsteady) <= UNSTEADY * len(steady),
        "ops": len({r.subject.op for r in rows}), "cases": len(rows), "timed": len(timed), "inside": inside,
        "outside": [f"{r.subject.op}:{r.case['name']}" for r in outside], "unsteady": len(unsteady),
        "left_out": len(rows) - len(steady),
        "mean": round(math.exp(statistics.fmean(logs)), 4) if logs else None,
        "low": round(math.exp(min(logs)), 4) if logs else None,
        "high": round(math.exp(max(logs)), 4) if logs else None,
    }  # fmt: skip
