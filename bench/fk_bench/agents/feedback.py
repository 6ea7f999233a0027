"""Feedback on an attempt as JSON: the verdict, the first failing case, times against baseline and floor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fk_bench.core.rows import Row, Status
from fk_bench.core.scores import FAILED, score
from fk_bench.kernels.report import clean
from fk_bench.profile import judged

CPU_NOTE = "CPU timer: it finds wrong candidates, and makes no claim about the speed on a GPU"
_VALUES = re.compile(r"at (?P<index>\[[^\]]*\]|\d+) expected (?P<expected>\S+), got (?P<got>[^\s;()]+)")


def verdict(rows: Sequence[Row]) -> Status:
    """The status of the first failing case; OK if at least one case was checked and none failed."""
    failed = next((r.status for r in rows if r.status in FAILED), None)
    if failed is not None:
        return failed
    return Status.OK if any(r.status is Status.OK for r in rows) else Status.SKIPPED


def of_rows(op: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The feedback from the rows of an op's cases."""
    rows = [clean(r) for r in rows]
    total = score(op, rows)
    found: dict[str, Any] = {
        "op": op, "verdict": verdict(rows).value, "cases": total.cases - total.not_run, "failed": total.failed,
        "timed": total.timed,
    }  # fmt: skip
    if (bad := next((r for r in rows if r.status in FAILED), None)) is not None:
        found["first_failure"] = failure(bad)
    if total.speedup is not None:
        found["speedup"] = round(total.speedup, 4)
        if total.ci95:
            found["speedup_95"] = [round(v, 4) for v in total.ci95]
    elif total.why_none:
        found["no_speedup"] = total.why_none
    if total.provisional:
        found["provisional"] = total.provisional
    found["times"] = [judged.times(r) for r in rows if "time_us_p50" in r.metrics and r.status is Status.OK]
    if any(r.case.get("timer") == "cpu" for r in rows):
        found["note"] = CPU_NOTE
    return found


def failure(row: Row) -> dict[str, Any]:
    """A failing case: its conditions, the reason, and the expected and actual value of one element."""
    case = {k: row.case[k] for k in ("name", "source", "dims", "dtype") if k in row.case}
    found: dict[str, Any] = {
        "status": row.status.value,
        "case": case,
        "reason": row.reason.partition("\n")[0],
    }
    if row.status is Status.WRONG and (values := _VALUES.search(row.reason)):
        found |= values.groupdict()
    if row.case.get("scan"):
        found["scan"] = row.case["scan"]
    return found
