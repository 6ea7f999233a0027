"""RUN/results.csv: a line for each lane and load, with every metric, its 95% interval and the main speedups."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.core.pages import model_name
from fk_bench.core.rows import Row
from fk_bench.serving import summary
from fk_bench.serving.report import numbers, verdict

NAME = "results.csv"
_LEADING = ("model", "gpu", "gpus", "lane", "baseline", "load", "kind", "value", "input_len", "output_len", "rounds",
            "in_flight")  # fmt: skip


def records(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The lines. Percentiles that the requests do not support have no column value, as in the page."""
    names = summary.names(found)
    results, bases = summary.lanes(found, names), numbers.baselines(found, names)
    known, run = {r.lane: r for r in results}, summary.run_case(found)
    made = []
    for result in results:
        for cell in result.cells:
            level, base = cell.level, bases[result.lane]
            line: dict[str, Any] = {
                "model": model_name(found[0].subject.model), "gpu": found[0].machine.gpu, "gpus": found[0].machine.gpus,
                "lane": result.lane, "baseline": base, "load": level.label, "kind": level.kind, "value": level.value,
                "input_len": level.input_len or run.get("input_len"),
                "output_len": level.output_len or run.get("output_len"), "rounds": len(cell.rounds),
            }  # fmt: skip
            flight = numbers.mean_in_flight(cell)
            if flight is not None:
                line["in_flight"] = flight
            for metric in cell.mean:
                if (value := numbers.mean(cell, metric)) is not None:
                    line |= _with_interval(metric, value, cell.ci95.get(metric))
            other = None if numbers.own_kernels(result) else numbers.cell_at(known.get(base), level)
            for metric in (*verdict.NAMES, "goodput_requests_per_s"):
                if (ratio := verdict.speedup(cell, other, metric)) is not None:
                    line |= _with_interval(f"speedup_{metric}", ratio.ratio, ratio.ci95)
            made.append(line)
    return made


def _with_interval(name: str, value: float, interval: tuple[float, float] | None) -> dict[str, float]:
    low_high = {} if interval is None else {f"{name}_ci95_low": interval[0], f"{name}_ci95_high": interval[1]}
    return {name: value, **low_high}


def write(path: Path, found: Sequence[Row]) -> None:
    lines = records(found)
    columns = list(dict.fromkeys([*_LEADING, *(name for line in lines for name in line)]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(lines)
