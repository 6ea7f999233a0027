"""The pages of the board: one index, one page for each set, and the same figures as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fk_bench.board import figures
from fk_bench.board.standings import (
    Entry,
    Standing,
    cell,
    data,
    fast_p,
    kernel_speedup,
    part,
    rank_value,
    selftest_of,
    speed,
)
from fk_bench.board.submission import facts
from fk_bench.core import pages
from fk_bench.core.rows import Row, provisional
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate.macro_eval import Item
from fk_bench.evaluate.run import results, selftest
from fk_bench.kernels.report import clean

CPU = "Measured on a CPU: it shows that sets run and are right, and says nothing about their speed on a GPU."
RANKED = (("score", "score"), ("S", "speed"), ("C", "correctness"), ("coverage", "coverage"))
MOST_CASES = 4000  # on a page
MOST_SETS = 12  # in a figure


def write(out: Path, found: Sequence[Standing], warnings: Sequence[str]) -> Path:
    """Write the site; returns its index. Pages of sets that are no longer there are removed."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "sets"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    leagues = [_league(s) for s in found]
    index = out / "index.html"
    index.write_text(
        pages.render(
            "board.html",
            leagues=leagues,
            ranked=RANKED,
            part_columns=results.PART_COLUMNS,
            warnings=[printable(w) for w in warnings],
        ),
        encoding="utf-8",
    )
    for standing in found:
        for place, entry in enumerate(standing.entries, 1):
            page = pages.render("board_set.html", **_set(standing, entry, place))
            (folder / f"{entry.slug}.html").write_text(page, encoding="utf-8")
    (out / "board.json").write_text(json.dumps([_plain(s) for s in found], indent=1), encoding="utf-8")
    return index


def _number(value: float | None, places: int = 3) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _league(standing: Standing) -> dict[str, Any]:
    sets = [_line(standing, e, n) for n, e in enumerate(standing.entries, 1)]
    speeds = {e.name: e.speeds for e in standing.entries[:MOST_SETS]}
    best = standing.entries[0]
    return {
        "league": standing.league, "slug": standing.league.slug, "cpu": "" if standing.league.gpu else CPU,
        "sets": sets,
        "models": bool(standing.declared or any(e.items for e in standing.entries)), "heat": _heat(standing),
        "kernels": any(e.cases for e in standing.entries), "curves": figures.curves(speeds, "fast_p of the sets"),
        "figure": figures.by_architecture(_panels(best), f"Speedup of {best.name} by architecture"), "best": best.name,
        "agents": any(e.agent for e in standing.entries), "costs": any(s["cost"] for s in sets),
        "modes": sorted({e.mode for e in standing.entries if e.mode}),
        "hosts": sorted({i.host for i in standing.declared or ()}),
        "levels": sorted({i.level for i in standing.declared or ()}), "data": data(standing),
        "unknown": standing.declared is None and any(e.items for e in standing.entries),
    }  # fmt: skip


def _line(standing: Standing, entry: Entry, place: int) -> dict[str, Any]:
    overall = part(entry)
    timed = entry.speeds
    return {
        "place": place, "name": printable(entry.name), "slug": entry.slug, "mode": entry.mode,
        "agent": printable(entry.agent),
        "author": printable(entry.about.author) if entry.about else "", "overall": overall,
        "S": None if overall is None else overall.S, "score_ci": None if overall is None else overall.ci95.get("score"),
        "kept": _percent(entry.kept), "as_is": None if entry.as_is is None else entry.as_is.overall.score,
        "kernel_speedup": kernel_speedup(entry), "fast_1": fast_p(timed, 1.0) if timed else None,
        "cases": len(entry.cases), "timed": len(timed),
        "failed": sum(s == 0 for s in timed),
        "parts": [] if entry.macro is None else results.part_lines(entry.macro), "dropped": _dropped(entry),
        "gap": {k.replace("_", " "): v for k, v in entry.gap.items()}, "cost": _cost(entry),
        "selftest": {h: printable(v, 400) for h, v in selftest_of(standing, entry).items()},
        "trusted": _trusted(standing, entry),
        "half": standing.thresholds.get("half", {}).get(entry.name),
        "double": standing.thresholds.get("double", {}).get(entry.name),
        "measured": entry.measured, "ranks": standing.ranges.get(entry.name),
        "provisional": printable(provisional([*entry.cases, *entry.ops])),
        "refused": [printable(w, 500) for w in entry.refused], "warnings": [printable(w) for w in entry.warnings],
    }  # fmt: skip


def _trusted(standing: Standing, entry: Entry) -> str:
    """The verdict of the do-nothing set in one word, over all hosts of a set; '' for kernels alone."""
    found = list(selftest_of(standing, entry).values())
    if any(v.startswith("failed") for v in found):
        return "failed"
    if all(v == selftest.PASSED for v in found):
        return selftest.PASSED if found else ""
    return "not run" if all(v == "not run" for v in found) else "in part"


def _cost(entry: Entry) -> str:
    c = entry.cost
    parts = [f"{c['tokens']:,.0f} tokens"] if c.get("tokens") else []
    parts += [f"${c['cost_usd']:,.2f}"] if c.get("cost_usd") else []
    return ", ".join(parts + ([f"{c['hours']:.2f} h"] if c.get("hours") else []))


def _dropped(entry: Entry) -> list[str]:
    return [
        printable(
            f"{row.subject.model} in {row.subject.host}: {d['op']}, {d['reason']}: {d.get('text', '')}", 400
        )
        for row in entry.items.values()
        for d in row.case.get("dropped", ())
        if d.get("reason") != "unused"
    ]


def _heat(standing: Standing) -> list[dict[str, Any]]:
    """A row for each item, with the cells of all sets."""
    items = standing.declared or tuple(dict.fromkeys(i for e in standing.entries for i in e.items))
    return [
        {"item": _item(i), "category": i.category, "cells": [cell(e, i) for e in standing.entries]}
        for i in items
    ]


def _item(item: Item) -> str:
    return f"{item.model}, {item.workload} in {item.host}" + (
        f", {item.ranks} GPUs" if item.ranks > 1 else ""
    )


def _panels(entry: Entry) -> dict[str, dict[str, float]]:
    """{category: {model: speedup}} of the valid items; the geometric mean over hosts and workloads."""
    found: dict[str, dict[str, list[float]]] = {}
    for item, row in entry.items.items():
        if (o := results.valid_outcome_of(row)) is not None:
            speed = (o.throughput * o.latency) ** 0.5
            found.setdefault(item.category, {}).setdefault(item.model, []).append(speed)
    return {
        category: {m: _geometric(values) for m, values in models.items()}
        for category, models in found.items()
    }


def _geometric(values: Sequence[float]) -> float:
    from fk_bench.core.stats import geometric_mean

    return geometric_mean(values)[0]


def _set(standing: Standing, entry: Entry, place: int) -> dict[str, Any]:
    """The values of a set's page: every item, op and case, the sources and where the rows are from."""
    cases = [clean(r) for r in entry.cases[:MOST_CASES]]
    levels = sorted({int(r.case.get("level", 0)) for r in cases})
    by_level = {
        f"level {n}": [s for r in cases if r.case.get("level") == n and (s := speed(r)) is not None]
        for n in levels
    }
    first = entry.first
    assert first is not None, entry.name
    return {
        "line": _line(standing, entry, place), "league": standing.league, "of": len(standing.entries),
        "cpu": "" if standing.league.gpu else CPU, "part_columns": results.PART_COLUMNS,
        "facts": {k: printable(str(v)) for k, v in facts(entry.about).items()},
        "items": [_item_line(i, r) for i, r in entry.items.items()], "ops": [_op_line(r) for r in entry.ops],
        "tasks": [_task_line(r) for r in entry.tasks], "cases": [_case_line(r) for r in cases],
        "more": max(0, len(entry.cases) - MOST_CASES), "sources": entry.sources, "first": first,
        "figure": figures.by_architecture(_panels(entry), f"Speedup of {entry.name} by architecture"),
        "curves": figures.curves(by_level, f"fast_p of {entry.name} by level"), "runs": entry.runs,
        "files": next((str(r.case["files"]) for r in entry.items.values() if "files" in r.case), ""),
    }  # fmt: skip


def _with_interval(row: Row, metric: str) -> str:
    found = row.ci95.get(metric)
    mark = " provisional" if row.provisional and metric in row.metrics else ""
    return _number(row.metrics.get(metric)) + (f" [{found[0]:.3f}, {found[1]:.3f}]" if found else "") + mark


def _item_line(item: Item, row: Row) -> list[str]:
    outcome = results.outcome_of(row)
    dropped = "; ".join(f"{d['op']}: {d['reason']}" for d in row.case.get("dropped", ()))
    return [
        _item(item), item.category, _with_interval(row, "throughput_speedup"), _with_interval(row, "latency_speedup"),
        _number(None if outcome is None else outcome.correctness), ", ".join(row.case.get("kept", ())),
        printable(dropped), row.status.value, printable(row.reason),
    ]  # fmt: skip


def _op_line(row: Row) -> list[str]:
    return [
        str(row.subject.op), str(row.case.get("how", "")), _with_interval(row, "speedup_geomean"), row.status.value,
        printable(row.reason),
    ]  # fmt: skip


def _task_line(row: Row) -> list[str]:
    m = row.metrics
    return [
        str(row.subject.op), row.status.value, f"{m.get('attempts', 0):.0f}", _number(m.get("stub_speedup")),
        _number(m.get("seen_speedup")), _with_interval(row, "speedup_geomean"),
        printable(row.reason or str(row.case.get("ended"))),
    ]  # fmt: skip


def _case_line(row: Row) -> list[str]:
    c, m = row.case, row.metrics
    return [
        str(row.subject.op), str(c.get("name", "")), str(c.get("source", "")), str(c.get("dtype", "")),
        row.status.value, row.baseline or "", _number(m.get("time_us_p50"), 2), _number(m.get("baseline_us_p50"), 2),
        _with_interval(row, "speedup"), row.reason.partition("\n")[0],
    ]  # fmt: skip


def _plain(standing: Standing) -> dict[str, Any]:
    """A league for machines."""
    keys = (
        "place",
        "name",
        "mode",
        "agent",
        "author",
        "refused",
        "as_is",
        "kernel_speedup",
        "fast_1",
        "cases",
        "half",
        "double",
        "measured",
        "ranks",
        "selftest",
    )
    sets = []
    for n, entry in enumerate(standing.entries, 1):
        line = _line(standing, entry, n)
        scored: dict[str, Any] = {"kept": entry.kept, "cost": entry.cost, "composition": entry.gap}
        if entry.macro is not None:
            scored |= {k: rank_value(entry, k) for k, _ in RANKED}
            scored |= {"ci95": entry.macro.overall.ci95, "parts": results.parts_of(entry.macro)}
        sets.append(
            {**{k: line[k] for k in keys}, **scored, "page": f"sets/{entry.slug}.html", "runs": entry.runs}
        )
    return {**vars(standing.league), "sets": sets}
