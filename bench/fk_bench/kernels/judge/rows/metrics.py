"""The numbers of a case's row, from the judge's evidence."""

from __future__ import annotations

import numpy as np

from fastkernels.core.spec import Case, OpSpec
from fk_bench.core.rows import Row
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.clock import call_times
from fk_bench.kernels.judge.rows.verdict import CaseVerdict, Evidence


def fill(row: Row, seen: Evidence, verdict: CaseVerdict, spec: OpSpec, cost: Case, import_s: float) -> None:
    """Add errors, times and the speedup to a row. cost: the case as it was run, for bytes and operations."""
    if seen.passed_over:
        row.case["passed_over"] = {n: why[:200] for n, why in seen.passed_over.items()}
    if seen.checked is not None:
        row.baseline = seen.chosen.name
        row.case["live"] = seen.checked.live
        row.metrics |= {
            "error_rms": seen.checked.errors.rms, "baseline_error_rms": seen.chosen.errors.rms,
            "error_max": seen.checked.errors.max, "import_s": import_s, "compile_s": seen.checked.first_s,
        }  # fmt: skip
    if seen.timed is not None and not (seen.wrong or seen.failure or seen.broken):
        _times(row, seen.timed, verdict, spec.bytes_moved(cost), spec.flops(cost), seen.floor_s)
        if spec.traffic is not None and verdict.speedup:
            sent = spec.traffic(cost)
            for name, of in (("bus_gb_per_s", "time_us_p50"), ("baseline_bus_gb_per_s", "baseline_us_p50")):
                row.metrics[name] = sent / row.metrics[of] / 1e3
            if seen.link_gb_per_s:
                row.metrics["link_gb_per_s"] = seen.link_gb_per_s
    if seen.estimates:
        row.case["baselines_us"] = {n: round(1e6 * s, 2) for n, s in seen.estimates.items()}


def _times(row: Row, timed: Timed, verdict: CaseVerdict, size: int, work: int, floor: float) -> None:
    charged = call_times.charge(timed.candidate, timed.baseline)
    if charged:
        row.metrics["charged_us"] = 1e6 * charged
    alone = call_times.counted_alone(timed.candidate, timed.baseline) if verdict.speedup else None
    more, both = (charged, 0.0) if alone is None else (alone.of(charged), alone.both)
    row.metrics |= {f"time_us_{k}": v + 1e6 * more for k, v in timed.candidate.percentiles().items()}
    row.metrics |= {f"baseline_us_{k}": v + 1e6 * both for k, v in timed.baseline.percentiles().items()}
    if alone is not None:
        row.case["counted"] = "alone"
        row.metrics |= {
            "batch_us": 1e6 * timed.candidate.time,
            "baseline_batch_us": 1e6 * timed.baseline.time,
        }
    row.metrics["calls"] = timed.candidate.n
    row.metrics["rounds"] = len(timed.candidate.single)
    row.metrics["intercept_us"] = 1e6 * timed.candidate.intercept
    row.metrics["baseline_intercept_us"] = 1e6 * timed.baseline.intercept
    sides = {"candidate": timed.candidate, "baseline": timed.baseline}
    row.case["alone"] = {
        who: {kind: microseconds for kind, values in (("alone", side.alone), ("passed", side.passed))
              if (microseconds := _quantiles(values))}
        for who, side in sides.items()
    }  # fmt: skip
    if timed.traced.trace:
        row.case["trace"] = timed.traced.trace
    if timed.traced.kernels:
        row.case["kernels"] = timed.traced.kernels
    for name, value in (("call_s", timed.traced.call_s), ("launches", timed.traced.launches)):
        if value is not None:
            row.metrics[f"trace_{name}"] = value
    if not verdict.speedup:
        return
    found = call_times.speedup(timed.candidate, timed.baseline, timed.again, charged, alone=alone)
    row.metrics |= {"speedup": found.value, "again": found.again, "noise": abs(found.again - 1)}
    row.ci95["speedup"] = found.interval
    row.case["significant"] = found.significant
    row.metrics |= {"gb_per_s": size / found.time / 1e9, "tflops": work / found.time / 1e12}
    if floor:
        row.metrics |= {"floor_us": 1e6 * floor, "roofline_pct": 100 * floor / found.time}


def _quantiles(values: list[float]) -> list[float]:
    """Microseconds at the quantiles 0.1, 0.25, 0.5, 0.75 and 0.9."""
    return (
        [round(1e6 * float(v), 2) for v in np.quantile(values, (0.1, 0.25, 0.5, 0.75, 0.9))] if values else []
    )
