"""Rows of `fk-bench kernels` as Traces, and Traces of others as rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.case import Case
from fk_bench.core import rows
from fk_bench.core.rows import Machine, Row, Status, Subject
from fk_bench.core.runs import missing
from fk_bench.core.scores import latest
from fk_bench.kernels.report import CPU_MARK
from fk_bench.trace.schema import Trace, TraceError, finite

EXTRA = "fk_bench"  # key of our facts in a Trace's correctness.extra
STATUS = {
    Status.OK: "PASSED", Status.WRONG: "INCORRECT_NUMERICAL", Status.COMPILE_ERROR: "COMPILE_ERROR",
    Status.RUNTIME_ERROR: "RUNTIME_ERROR", Status.CRASH: "RUNTIME_ERROR", Status.OOM: "RUNTIME_ERROR",
    Status.TIMEOUT: "TIMEOUT",
}  # fmt: skip
THEIRS = {
    "PASSED": Status.OK, "INCORRECT_NUMERICAL": Status.WRONG, "INCORRECT_SHAPE": Status.SIGNATURE_MISMATCH,
    "INCORRECT_DTYPE": Status.SIGNATURE_MISMATCH, "COMPILE_ERROR": Status.COMPILE_ERROR,
    "RUNTIME_ERROR": Status.RUNTIME_ERROR, "TIMEOUT": Status.TIMEOUT,
}  # fmt: skip
PROVISIONAL = "read from a FlashInfer-Trace data set, not judged here"


def read_run(run: Path) -> list[Row]:
    """The cases of a run of `kernels`, the last row of each. Raises TraceError."""
    file = run / "rows.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise TraceError(missing(run))
    found = latest(rows.read(file)[0])
    if not found:
        raise TraceError(f"{file} has no case of `fk-bench kernels`")
    return found


def case_of(row: Row) -> Case:
    """The case that was judged. Raises TraceError for one that no Workload states."""
    if row.case.get("source") == "extreme":
        raise TraceError("cases of extreme values are no Workloads")
    dims = {k: tuple(v) if isinstance(v, list) else v for k, v in (row.case.get("dims") or {}).items()}
    return Case(str(row.case.get("name")), dims, str(row.case.get("dtype")), float(row.case.get("weight", 1)))


def evaluation(row: Row) -> dict[str, Any]:
    """The verdict as an Evaluation. Raises TraceError for a status that the schema does not have."""
    if row.status not in STATUS:
        raise TraceError(f"the schema has no status for {row.status.value!r}")
    metrics, machine = row.metrics, row.machine
    hardware = machine.gpu or f"CPU {machine.cpu}".strip()
    found: dict[str, Any] = {
        "status": STATUS[row.status],
        "environment": {"hardware": hardware, "libs": dict(row.versions)},
        "timestamp": row.time,
        "log": row.reason,
        "correctness": None,
        "performance": None,
    }
    if row.status in (Status.OK, Status.WRONG):
        facts = {"run": row.run_id, "baseline": row.baseline, "case": row.case.get("name"), "metrics": metrics,
                 "ci95": {k: list(v) for k, v in row.ci95.items()}, "provisional": row.provisional}  # fmt: skip
        found["correctness"] = {
            "max_absolute_error": finite(metrics.get("error_max")),
            "max_relative_error": "NaN",  # the judge bounds errors by those of honest kernels instead
            "extra": {EXTRA: facts},
        }
    if row.status is Status.OK:
        if "speedup" not in metrics:
            raise TraceError("a case that was not timed has no Trace: PASSED needs a latency")
        found["performance"] = {
            "latency_ms": metrics["time_us_p50"] / 1e3,
            "reference_latency_ms": metrics["baseline_us_p50"] / 1e3,
            "speedup_factor": metrics["speedup"],
        }
        found["log"] = f"fk-bench: reference_latency_ms is the time of the baseline {row.baseline}"
        if machine.gpu is None:
            found["log"] += f". {CPU_MARK}"
        if row.provisional:
            found["log"] += f". Provisional: {row.provisional}"
    return found


def row_of(trace: Trace, op: str | None, run_id: str) -> Row:
    """A Trace as a row, with the judge's numbers if it has some. Raises TraceError for an unknown status.

    Nothing in it was judged here, so its speedup is no score (`provisional`).
    """
    found = trace.evaluation
    if found is None or found.status not in THEIRS:
        raise TraceError(f"{trace.definition}: unknown status {found.status if found else None!r}")
    ours = _ours(found.correctness.extra if found.correctness else None)
    numbers = ours.get("metrics")
    metrics = {k: float(v) for k, v in numbers.items() if _is_number(v)} if isinstance(numbers, dict) else {}
    if not metrics and found.performance is not None:
        metrics = {
            "time_us_mean": 1e3 * found.performance.latency_ms,
            "baseline_us_mean": 1e3 * found.performance.reference_latency_ms,
            "speedup": found.performance.speedup_factor,
        }
    if found.correctness is not None:
        metrics.setdefault("error_max", finite(found.correctness.max_absolute_error))
    hardware = found.environment.hardware
    is_cpu = "cpu" in hardware.lower()
    machine = Machine(cpu=hardware) if is_cpu else Machine(gpu=hardware, gpus=1)
    name = ours.get("case")
    return Row(
        run_id=run_id, time=found.timestamp, command="trace", status=THEIRS[found.status], reason=found.log[:2000],
        machine=machine, versions=found.environment.libs, subject=Subject(op=op, candidate=trace.solution),
        case={"kind": "case", "name": name if isinstance(name, str) else trace.workload.uuid, "source": "trace",
              "definition": trace.definition, "dims": trace.workload.axes},
        metrics=metrics, baseline=str(ours.get("baseline") or "reference"), provisional=PROVISIONAL,
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ours(extra: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = (extra or {}).get(EXTRA)
    return found if isinstance(found, dict) else {}
