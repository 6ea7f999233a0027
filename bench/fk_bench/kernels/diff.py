"""Compares two kernel runs: the same cases, and whether their speedups agree within their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row, Status, provisional
from fk_bench.core.scores import key, latest, scores
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.kernels.report import CPU_MARK, number, on_cpu, span

COLUMNS = (
    "op",
    "case",
    "source",
    "A us",
    "B us",
    "A speedup",
    "95%",
    "B speedup",
    "95%",
    "B / A",
    "verdict",
)


def compare(
    run_a: Path, run_b: Path, a: Sequence[Row], b: Sequence[Row], fail_under: float = 0.0
) -> dict[str, Any]:
    """{'ok', 'ratios': [...], 'agree', 'differ', 'problems': [...]}; see serving.diff.compare.

    ratio = speedup in B / speedup in A. Two results agree if their intervals overlap. Not ok if a case is correct in A
    and not in B, or a ratio is below `fail_under`. Raises ConfigError for a provisional run, which has no scores.
    """
    for run, found in ((run_a, a), (run_b, b)):
        if why := provisional(found):
            raise ConfigError(f"{run} is provisional, so its speedups cannot be compared. {why}")
    right = {key(r): r for r in latest(b)}
    ratios: list[dict[str, Any]] = []
    problems: list[str] = []
    gone = 0
    for row in latest(a):
        name, other = f"{row.subject.op} {row.case.get('name', '')}", right.get(key(row))
        if row.status is not Status.OK:
            continue
        if other is None or other.status is not Status.OK:
            problems.append(f"{name}: {f'{other.status.value} in B' if other else f'missing in {run_b}'}")
            gone += 1
        elif "speedup" in row.metrics and "speedup" in other.metrics:
            ratios.append(_ratio(row, other, fail_under))
    if not ratios:
        problems.append("no case has a speedup in both runs")
    failed = [x for x in ratios if x["failed"]]
    problems += [f"{x['op']} {x['case']}: {x['ratio']:.3f} is below {fail_under:g}" for x in failed]
    (_, all_a), (_, all_b) = scores(a), scores(b)
    verdicts = [x["verdict"] for x in ratios]
    return {
        "command": "diff", "ok": not failed and not gone and bool(ratios), "run_a": str(run_a), "run_b": str(run_b),
        "fail_under": fail_under, "ratios": ratios, "agree": verdicts.count("agree"),
        "differ": len(verdicts) - verdicts.count("agree") - verdicts.count("no interval"),
        "speedup_a": all_a.speedup, "speedup_b": all_b.speedup,
        "mark": CPU_MARK if on_cpu([*a, *b]) else "", "problems": problems,
    }  # fmt: skip


def _ratio(a: Row, b: Row, fail_under: float) -> dict[str, Any]:
    one, two = a.metrics["speedup"], b.metrics["speedup"]
    of_a, of_b = a.ci95.get("speedup"), b.ci95.get("speedup")
    ratio = two / one if one > 0 else math.nan
    if of_a is None or of_b is None:
        verdict = "no interval"
    elif of_a[1] < of_b[0] or of_b[1] < of_a[0]:
        verdict = "better" if ratio > 1 else "worse"
    else:
        verdict = "agree"
    return {
        "op": a.subject.op, "case": a.case.get("name"), "source": a.case.get("source"), "dtype": a.case.get("dtype"),
        "time_us_a": a.metrics.get("time_us_p50"), "time_us_b": b.metrics.get("time_us_p50"),
        "a": one, "b": two, "ci95_a": of_a, "ci95_b": of_b, "ratio": ratio, "verdict": verdict,
        "failed": not ratio >= fail_under,
    }  # fmt: skip


def cells(line: dict[str, Any]) -> list[str]:
    """One case as cells of COLUMNS."""
    return [
        line["op"], str(line["case"]), str(line["source"]), number(line["time_us_a"]), number(line["time_us_b"]),
        f"{line['a']:.3f}", span(line["ci95_a"]), f"{line['b']:.3f}", span(line["ci95_b"]), f"{line['ratio']:.3f}",
        line["verdict"] + (", below the gate" if line["failed"] else ""),
    ]  # fmt: skip
