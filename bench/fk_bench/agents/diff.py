"""Compares two runs of `fk-bench agent-loop` task by task: two settings of one agent, or two agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.agents.session import COMMAND, TASK
from fk_bench.core.rows import Row
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.kernels.report import CPU_MARK, on_cpu, span

COLUMNS = (
    "op", "A attempts", "A speedup", "95%", "B attempts", "B speedup", "95%", "B / A", "A seconds", "B seconds",
    "A tokens", "B tokens", "verdict",
)  # fmt: skip
NUMBERS = ("attempts", "seconds", "tokens", "cost_usd")


def is_loop(rows: Sequence[Row]) -> bool:
    return any(r.command == COMMAND for r in rows)


def compare(
    run_a: Path, run_b: Path, a: Sequence[Row], b: Sequence[Row], fail_under: float = 0.0
) -> dict[str, Any]:
    """{'ok', 'tasks': [...], 'labels', 'problems'}. Not ok if B lacks a task or a winner of A, or a ratio is too small.

    A task without a winner has no speedup: its stub stays. Two speedups agree if their intervals overlap.
    """
    of_a, of_b = (
        {str(r.subject.op): r for r in rows if (r.command, r.kind) == (COMMAND, TASK)} for rows in (a, b)
    )
    if empty := [run for run, found in ((run_a, of_a), (run_b, of_b)) if not found]:
        raise ConfigError(f"{empty[0]} has no finished task")
    lines = [_line(op, of_a.get(op), of_b.get(op), fail_under) for op in dict.fromkeys([*of_a, *of_b])]
    problems = [
        f"{x['op']}: {x['verdict']}" for x in lines if x["verdict"] in ("not in A", "not in B", "only A")
    ]
    problems += [
        f"{x['op']}: {x['ratio']:.3f} is below {fail_under:g}" for x in lines if x["failed"] and x["ratio"]
    ]
    return {
        "command": "diff", "ok": not any(x["failed"] for x in lines), "run_a": str(run_a), "run_b": str(run_b),
        "fail_under": fail_under, "tasks": lines, "labels": [_label(of_a), _label(of_b)],
        "mark": CPU_MARK if on_cpu([*a, *b]) else "", "problems": problems,
    }  # fmt: skip


def _label(tasks: dict[str, Row]) -> dict[str, str]:
    case = next(iter(tasks.values())).case
    return {key: str(case.get(key, "")) for key in ("agent", "mode", "suffix", "model")}


def _side(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {}
    won = row.case.get("best") is not None
    return {
        "speedup": row.metrics.get("speedup_geomean") if won else None, "won": won,
        "ci95": row.ci95.get("speedup_geomean") if won else None,
        "ended": row.case.get("ended", ""), **{n: row.metrics.get(n, 0.0) for n in NUMBERS},
    }  # fmt: skip


def _line(op: str, a: Row | None, b: Row | None, fail_under: float) -> dict[str, Any]:
    one, two = _side(a), _side(b)
    ratio = two["speedup"] / one["speedup"] if one.get("speedup") and two.get("speedup") else None
    failed = ratio is not None and ratio < fail_under
    if not one or not two:
        verdict = "not in B" if one else "not in A"
        failed = not two
    elif one["won"] != two["won"]:
        verdict = "only A" if one["won"] else "only B"
        failed = one["won"]
    elif not one["won"]:
        verdict = "no winner in either"
    elif ratio is None or one["ci95"] is None or two["ci95"] is None:
        verdict = "no interval"
    elif one["ci95"][1] < two["ci95"][0] or two["ci95"][1] < one["ci95"][0]:
        verdict = "better" if ratio > 1 else "worse"
    else:
        verdict = "agree"
    return {"op": op, "a": one, "b": two, "ratio": ratio, "verdict": verdict, "failed": failed}


def cells(line: dict[str, Any]) -> list[str]:
    """One task as cells of COLUMNS."""
    a, b = line["a"], line["b"]

    def number(side: dict[str, Any], key: str, text: str = ".0f") -> str:
        return "" if side.get(key) is None else format(side[key], text)

    return [
        line["op"], number(a, "attempts"), number(a, "speedup", ".3f"), span(a.get("ci95")), number(b, "attempts"),
        number(b, "speedup", ".3f"), span(b.get("ci95")), number(line, "ratio", ".3f"), number(a, "seconds"),
        number(b, "seconds"), number(a, "tokens"), number(b, "tokens"), line["verdict"],
    ]  # fmt: skip
