"""The judge's measurements of each timed case: the profile of an agent's attempt, of MCP's `profile` and of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fk_bench.core.rows import Row
from fk_bench.kernels.report import clean

TIMES = {
    "time_us_p50": "time_us", "baseline_us_p50": "baseline_us", "floor_us": "floor_us", "speedup": "speedup",
    "roofline_pct": "roofline_pct",
}  # fmt: skip
DETAILS = (
    "time_us_p20", "time_us_p80", "gb_per_s", "tflops", "roofline_pct", "error_rms", "error_max", "import_s",
    "compile_s", "trace_launches", "trace_call_s",
)  # fmt: skip


def times(row: Row) -> dict[str, Any]:
    """The times of a case against its baseline and its floor."""
    found: dict[str, Any] = {"case": row.case.get("name"), "baseline": row.baseline}
    found |= {name: round(row.metrics[k], 4) for k, name in TIMES.items() if k in row.metrics}
    if row.reason:
        found["remark"] = row.reason
    return found


def profile(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All that the judge measured of each timed case: throughput, share of the roofline, launches, kernels, phases."""
    return [
        {
            "case": r.case.get("name"), **times(r), **{k: r.metrics[k] for k in DETAILS if k in r.metrics},
            **{k: r.case[k] for k in ("kernels", "counted", "alone", "seconds") if k in r.case},
        }
        for r in map(clean, rows) if "time_us_p50" in r.metrics
    ]  # fmt: skip
