"""Compares two runs: the ratio of every (lane, load, metric), inverted where needed so that above 1 is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.core import rows, stats
from fk_bench.core.rows import Row
from fk_bench.core.runs import missing
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.serving.summary import HIGHER_IS_BETTER, Cell, cells

METRICS = ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "e2el_ms_p50")


COLUMNS = ("lane", "at", "metric", "A", "B", "ratio", "ci95", "verdict")


def load(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a run, and warnings about its lines. Raises ConfigError if there is no run."""
    file = path / "rows.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(missing(path))
    found, warnings = rows.read(file)
    if not found:
        raise ConfigError(f"{path} has no result row" + (f": {warnings[0]}" if warnings else ""))
    return found, warnings


def _cells(path: Path, found: Sequence[Row]) -> list[Cell]:
    made = cells(found)
    if not made and (others := {row.command for row in found} - {"serve-compare"}):
        of = " and ".join(sorted(others))
        accepted = "runs of serve-compare, kernels and agent-loop are compared"
        raise ConfigError(f"{path} has rows of {of}: {accepted}")
    if not made:
        raise ConfigError(f"{path} has no finished round")
    return made


def compare(
    run_a: Path, run_b: Path, metrics: Sequence[str] = METRICS, fail_under: float = 0.0
) -> dict[str, Any]:
    """{'ok', 'ratios': [...], 'problems': [...]}; not ok if a ratio is below `fail_under` or B lacks a cell of A.

    ratio = B / A where higher is better, A / B where lower is: 1.0 is as good as A, 0.9 is 10% worse. Its interval is
    a bootstrap over rounds. The gate uses the ratio itself; 'verdict' is 'worse' only if the whole interval is.
    Two kernel runs are compared case by case, by their speedups (fk_bench.kernels.diff), and two runs of agents task by
    task (fk_bench.agents.diff).
    """
    (rows_a, warn_a), (rows_b, warn_b) = load(run_a), load(run_b)
    from fk_bench.agents import diff as loops

    if loops.is_loop(rows_a) and loops.is_loop(rows_b):
        found = loops.compare(run_a, run_b, rows_a, rows_b, fail_under)
        return {**found, "problems": [*warn_a, *warn_b, *found["problems"]]}
    kernels = [any(r.command == "kernels" for r in found) for found in (rows_a, rows_b)]
    if any(kernels):
        from fk_bench.kernels import diff

        if not all(kernels):
            raise ConfigError(f"{run_b if kernels[0] else run_a} is not a kernels run, but the other one is")
        found = diff.compare(run_a, run_b, rows_a, rows_b, fail_under)
        return {**found, "problems": [*warn_a, *warn_b, *found["problems"]]}
    a, b = _cells(run_a, rows_a), _cells(run_b, rows_b)
    known = {m for cell in (*a, *b) for m in cell.mean}
    for metric in metrics:
        if metric not in known:
            raise ConfigError(
                f"--metrics: neither run has {metric!r}. They have: {', '.join(sorted(known))}."
            )
    right = {(cell.lane, cell.level): cell for cell in b}
    ratios: list[dict[str, Any]] = []
    problems = [*warn_a, *warn_b]
    gone = 0
    for cell in a:
        other = right.get((cell.lane, cell.level))
        if other is None:
            problems.append(f"{run_b} has no result of {cell.lane} at {cell.level.label}")
            gone += 1
            continue
        ratios += [_ratio(cell, other, m, fail_under) for m in metrics if m in cell.mean and m in other.mean]
    failed = [line for line in ratios if line["failed"]]
    problems += [_problem(line, fail_under) for line in failed]
    return {
        "command": "diff", "ok": not failed and not gone and bool(ratios), "run_a": str(run_a), "run_b": str(run_b),
        "fail_under": fail_under, "ratios": ratios, "problems": problems,
    }  # fmt: skip


def _problem(line: dict[str, Any], fail_under: float) -> str:
    where = f"{line['lane']} {line['at']} {line['metric']}"
    if line["ratio"] is None:
        return f"{where}: no ratio of {line['a']:g} and {line['b']:g}"
    return f"{where}: {line['ratio']:.3f} is below {fail_under:g}"


def _ratio(a: Cell, b: Cell, metric: str, fail_under: float) -> dict[str, Any]:
    top, bottom = (b, a) if metric in HIGHER_IS_BETTER else (a, b)
    ratio, interval = stats.bootstrap_ratio(top.values(metric), bottom.values(metric))
    if a.mean[metric] == b.mean[metric] == 0:  # tokens that arrived in one chunk have no time between them
        ratio, interval = 1.0, None
    finite = math.isfinite(ratio)
    if interval is None or not finite:
        verdict = "one round" if finite else "no ratio"
    else:
        verdict = "worse" if interval[1] < 1 else "better" if interval[0] > 1 else "same"
    return {
        "lane": a.lane, "at": a.level.label, "metric": metric, "a": a.mean[metric], "b": b.mean[metric],
        "ratio": ratio if finite else None, "ci95": interval, "verdict": verdict,
        "failed": not finite or ratio < fail_under,
    }  # fmt: skip


def shown(result: dict[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    """(columns, lines) of the table that shows a comparison."""
    if "tasks" in result:
        from fk_bench.agents import diff as loops

        return loops.COLUMNS, [loops.cells(line) for line in result["tasks"]]
    if "agree" in result:
        from fk_bench.kernels import diff

        return diff.COLUMNS, [diff.cells(line) for line in result["ratios"]]
    return COLUMNS, [table_cells(line) for line in result["ratios"]]


def table_cells(line: dict[str, Any]) -> list[str]:
    """One ratio as cells of a table."""
    interval = line["ci95"]
    return [
        line["lane"], line["at"], line["metric"], f"{line['a']:.2f}", f"{line['b']:.2f}",
        "" if line["ratio"] is None else f"{line['ratio']:.3f}",
        "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        line["verdict"] + (", below the gate" if line["failed"] else ""),
    ]  # fmt: skip
