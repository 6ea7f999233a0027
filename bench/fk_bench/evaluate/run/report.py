"""Tables and the page of an evaluation, from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fk_bench.core import pages
from fk_bench.core.rows import Row, provisional
from fk_bench.core.terminal.output import table
from fk_bench.evaluate.run import results, selftest
from fk_bench.evaluate.run.results import Scores
from fk_bench.evaluate.suites import Suite

COLUMNS = ("item", "category", "throughput", "latency", "correct", "kept", "dropped", "status", "over vLLM")


def item_lines(suite: Suite, rows: Sequence[Row], name: str, variant: str = "record") -> list[list[str]]:
    """A line of COLUMNS for every declared item."""
    done, lines = results.items_done(rows, name, variant), []
    for entry in suite.entries:
        row = done.get(entry.item)
        if row is None:
            lines.append([entry.name, entry.item.category, *[""] * 5, "not run", ""])
            continue
        ratio = results.production(rows, entry, name)
        lines.append([
            entry.name, entry.item.category, *(_speed(row, f"{p}_speedup") for p in ("throughput", "latency")),
            f"{row.metrics['correctness']:.3f}" if "correctness" in row.metrics else "",
            ", ".join(row.case["kept"]), "; ".join(f"{d['op']}: {d['reason']}" for d in row.case["dropped"]),
            row.status.value, "" if ratio is None else f"{ratio:.3f}",
        ])  # fmt: skip
    return lines


def _speed(row: Row, metric: str) -> str:
    if metric not in row.metrics:
        return ""
    low_high = row.ci95.get(metric)
    shown = f"{row.metrics[metric]:.3f}" + (f" [{low_high[0]:.3f}, {low_high[1]:.3f}]" if low_high else "")
    return shown + (" provisional" if row.provisional else "")


def op_lines(rows: Sequence[Row], name: str) -> list[list[str]]:
    return [
        [str(r.subject.op), r.case["how"], _speed(r, "speedup_geomean"), r.status.value, r.reason]
        for r in ops_of(rows, name)
    ]


def ops_of(rows: Sequence[Row], name: str) -> list[Row]:
    return [r for r in rows if r.kind == results.OP and r.case.get("set") == name]


def notes(rows: Sequence[Row], name: str, found: Scores) -> list[str]:
    """Lines below the tables: the score and its companions."""
    lines = [results.score_line(name, found.kept.overall)]
    lines.append(
        results.score_line(f"{name} as is, items with a dropped candidate not run", found.as_is.overall)
    )
    if found.best is not None:
        lines.append(results.score_line(f"{name}, best deployable subset (unranked)", found.best.overall))
    if unscored := [r for r in ops_of(rows, name) if r.provisional]:
        ops = ", ".join(dict.fromkeys(str(r.subject.op) for r in unscored))
        lines.append(f"PROVISIONAL: the speedups of {ops} are no scores. {provisional(unscored)}")
    gap = results.gap_of(rows, name)
    if gap:
        lines.append("composition: " + ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in gap.items()))
    for row in results.items_done(rows, name).values():
        where = f"{row.subject.model} in {row.subject.host}"
        if row.reason:
            lines.append(f"{where}: {row.reason}")
        lines += [f"{where}: dropped {d['op']} ({d['reason']}): {d['text']}" for d in row.case["dropped"]]
    return lines


def selftest_line(suite: Suite, rows: Sequence[Row]) -> str:
    """Whether the hosts of a suite measure 1 for a set that changes nothing."""
    found = results.selftest_of(suite, rows)
    line = "selftest: " + "; ".join(f"{host} {verdict}" for host, verdict in found.items())
    return line + ("" if all(v == selftest.PASSED for v in found.values()) else " (--selftest measures it)")


def show(suite: Suite, rows: Sequence[Row], scored: Mapping[str, Scores]) -> None:
    print(selftest_line(suite, rows))
    for name, found in scored.items():
        if ops := op_lines(rows, name):
            table(f"{name}: ops, judged against production", ["op", "", "speedup", "status", "reason"], ops)
        title = f"{name}: suite {suite.name} ({suite.digest}), against the host without the set"
        table(title, COLUMNS, item_lines(suite, rows, name))
        table(f"{name}: parts of the score", results.PART_COLUMNS, results.part_lines(found.kept))
        for line in notes(rows, name, found):
            print(line)


def write(folder: Path, suite: Suite, rows: Sequence[Row], scored: Mapping[str, Scores]) -> Path:
    """Write the page; returns its path."""
    path = folder / "report.html"
    sections: list[dict[str, Any]] = [
        {
            "name": name, "lines": item_lines(suite, rows, name), "ops": op_lines(rows, name),
            "notes": notes(rows, name, found), "parts": results.part_lines(found.kept),
        }
        for name, found in scored.items()
    ]  # fmt: skip
    text = pages.render(
        "eval.html", suite=suite, first=rows[0], when=pages.period(rows), columns=COLUMNS, sections=sections,
        part_columns=results.PART_COLUMNS, selftest=selftest_line(suite, rows),
        cpu=rows[0].machine.gpus == 0,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return path
