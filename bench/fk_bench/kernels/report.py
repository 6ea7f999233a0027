"""Kernel runs for people, made from their rows: tables, RUN/report.html, and a line per case."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fk_bench.core import pages, rows
from fk_bench.core.rows import Row, Status
from fk_bench.core.runs import missing
from fk_bench.core.scores import FAILED, Score, key, latest, scores
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.core.terminal.output import table
from fk_bench.core.terminal.text import printable

_MAX_SOURCE = 256 << 10  # characters of a candidate's file in the page
CPU_MARK = "CPU timer: harness check, not a speed claim"
COLUMNS = (
    "op", "case", "source", "status", "baseline", "time us [p20-p80]", "baseline us", "speedup (95%)", "signif.", "A/A",
    "GB/s", "TFLOP/s", "% roof",
)  # fmt: skip
TIPS = {
    "A/A": "The baseline measured twice: its time over its own time in this case. Differences below it are noise",
    "signif.": "Whether the speedup's interval excludes 1 and the difference exceeds the baseline's own (A/A)",
    "% roof": "Share of the machine's bandwidth or arithmetic peak, whichever limits the case",
    "time us [p20-p80]": "Median over batches, with p20 and p80",
}  # fmt: skip


def clean(row: Row) -> Row:
    """The row with all text that a candidate may have chosen made printable; reasons keep their lines."""
    return row.model_copy(
        update={
            "reason": printable(row.reason, lines=True) if row.reason else row.reason,
            "baseline": _clean(row.baseline),
            "case": _clean(row.case),
            "subject": row.subject.model_copy(update=_clean(dict(row.subject))),
        }
    )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, (list, tuple)) else value


def on_cpu(found: Sequence[Row]) -> bool:
    return any(r.case.get("timer") == "cpu" for r in found)


def live(found: Sequence[Row], candidates: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{op: {calls, in}}: the ops whose cases each candidate ran in, and its calls in one call of each case."""
    said: dict[str, dict[str, Any]] = {op: {"calls": 0, "in": []} for op in candidates}
    for row in latest(found):
        for op, calls in row.case.get("candidates", {}).items():
            if calls and op in said:
                said[op]["calls"] += calls
                said[op]["in"] = list(dict.fromkeys([*said[op]["in"], row.subject.op]))
    return said


def live_lines(found: Sequence[Row]) -> list[list[str]]:
    """`live` as cells; the candidates are in the order of the rows."""
    named = dict.fromkeys(op for r in latest(found) for op in r.case.get("candidates", {}))
    return [[op, str(n["calls"]), ", ".join(n["in"]) or "nowhere"] for op, n in live(found, named).items()]


def noise(cases: Sequence[Row]) -> float | None:
    """The largest deviation from 1 of the baseline against itself: smaller differences are not significant."""
    return max((r.metrics["noise"] for r in cases if "noise" in r.metrics), default=None)


def _typical_noise(cases: Sequence[Row]) -> str:
    """The median over the cases of the baseline's deviation from itself, in percent."""
    known = [100 * r.metrics["noise"] for r in cases if "noise" in r.metrics]
    return number(statistics.median(known), 2) if known else ""


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}" if abs(value) < 100 else f"{value:.0f}"


def span(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"


def speedup(value: float | None, interval: tuple[float, float] | None) -> str:
    return "" if value is None else f"{value:.3f}" + (f" ({span(interval)})" if interval else "")


def cells(row: Row) -> list[str]:
    """A case as cells of COLUMNS."""
    m = row.metrics
    # Times that are too unsteady for a result are only in the details.
    steady = "speedup" in m or m.get("time_us_p20", 0.0) > 0 < m.get("baseline_us_p50", 0.0)
    times = [number(m.get(f"time_us_p{p}")) if steady else "" for p in (50, 20, 80)]
    known = row.case.get("significant")
    significant = "" if known is None else "yes" if known else "no"
    return [
        str(row.subject.op), str(row.case.get("name", "")), str(row.case.get("source", "")), row.status.value,
        row.baseline or "", f"{times[0]} [{times[1]}-{times[2]}]" if times[0] else "",
        number(m.get("baseline_us_p50")) if steady else "",
        speedup(m.get("speedup"), row.ci95.get("speedup")), significant,
        f"{m['again']:.3f}" if "again" in m else "",
        number(m.get("gb_per_s")), number(m.get("tflops")), number(m.get("roofline_pct")),
    ]  # fmt: skip


def line(row: Row) -> str:
    """A case in one line, for progress output."""
    row = clean(row)
    op, name, source, status, baseline, time, _, ratio, significant, *_ = cells(row)
    said = f"{op:<20} {name:<16} {source:<9} {status:<8}"
    if time:
        said += f" {time} us, {ratio or 'no speedup'} over {baseline}" + (
            ", significant" if significant == "yes" else ""
        )
    if row.provisional:
        said += " PROVISIONAL"
    return said + (f" {_first_line(row.reason)}" if row.reason else "")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].replace("\t", " ")


def show(found: Sequence[Row]) -> None:
    """Print the cases, the failures and the means."""
    found = [clean(r) for r in found]
    cases = latest(found)
    note = f" ({CPU_MARK})" if on_cpu(cases) else ""
    if warning := headline(found):
        print(warning)
    table(f"kernels{note}", COLUMNS, [cells(r) for r in cases])
    for row in cases:
        if row.reason:
            print(
                f"{row.subject.op} {row.case.get('name', '')}: {row.status.value}: {_first_line(row.reason)}"
            )
    if lines := live_lines(found):
        table("candidates that ran", LIVE_COLUMNS, lines)
    ops, all_cases = scores(found)
    lines = [score_cells(s) for s in (*ops, *([all_cases] if len(ops) > 1 else []))]
    table(f"speedup, geometric mean weighted by production's calls{note}", SCORE_COLUMNS, lines)
    for s in ops if len(ops) > 1 else [all_cases]:
        if s.why_none:
            print(s.why_none)


def show_phases(found: Sequence[Row]) -> None:
    """Print the seconds of the judge by phase: `wait: COMMAND` are those of the two processes."""
    phases: Counter[str] = Counter()
    for row in found:
        phases.update(row.case.get("seconds", {}))
    if not (total := sum(phases.values())):
        return
    lines = [[name, f"{s:.2f}", f"{100 * s / total:.0f}"] for name, s in phases.most_common() if s >= 0.005]
    table("time of the judge", ("phase", "seconds", "%"), [*lines, ["all", f"{total:.2f}", "100"]])


LIVE_COLUMNS = ("candidate", "calls", "inside")
SCORE_COLUMNS = ("op", "speedup (95%)", "timed", "checked", "failed", "not run")


def score_cells(s: Score) -> list[str]:
    mean = speedup(s.speedup, s.ci95) + (" provisional" if s.speedup is not None and s.provisional else "")
    checked = s.cases - s.not_run
    return [s.op, mean, f"{s.timed} of {s.wanted}", str(checked), str(s.failed), str(s.not_run)]


def headline(found: Sequence[Row]) -> str:
    """The warning above all numbers if some are no scores: which libraries are missing, and how to get them."""
    cases = [r for r in latest(found) if r.provisional]
    if not cases:
        return ""
    why = "; ".join(dict.fromkeys(r.provisional for r in cases))
    return f"PROVISIONAL: the speedups of {len(cases)} cases are no scores. {why}"


# -- the page


def render(run: Path, found: Sequence[Row] | None = None, warnings: Sequence[str] = ()) -> Path:
    """Write RUN/report.html from RUN/rows.jsonl. Raises ConfigError if there is no case to show."""
    if found is None:
        file = run / "rows.jsonl"
        if not file.is_file():
            raise ConfigError(missing(run))
        found, warnings = rows.read(file)
    if not latest(found):
        raise ConfigError(f"{run / 'rows.jsonl'} has no judged case")
    page = write(run, found, warnings)
    if page is None:
        raise ConfigError("the report needs fk-bench's libraries: pip install 'fastkernels[bench]'")
    return page


def write(run: Path, found: Sequence[Row], warnings: Sequence[str] = ()) -> Path | None:
    """Write RUN/report.html from these rows, at least one; None, with a warning, where its libraries are missing."""
    path = run / "report.html"
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(html(found, warnings, run))
    except ModuleNotFoundError as error:
        print(
            f"warning: no report.html: the package {error.name} is not installed; the rows are complete, and "
            f"`fk-bench report {run}` makes the report where it is",
            file=sys.stderr,
        )
        return None
    partial.replace(path)
    return path


def html(found: Sequence[Row], warnings: Sequence[str], run: Path | None = None) -> str:
    """The page. All text is escaped; the page loads nothing."""
    from fk_bench.kernels import plots

    sources = _sources(found, run)
    found, warnings = [clean(r) for r in found], [printable(w) for w in warnings]
    cases = latest(found)
    ops, total = scores(found)
    names = [s.op for s in ops]
    return pages.render(
        "kernels.html",
        title=", ".join(names) if len(names) <= 4 else f"{len(names)} ops", first=found[0], when=pages.period(found),
        card=_card(total, cases), tips=TIPS,
        warnings=[w for w in (headline(found), *warnings) if w], cpu=CPU_MARK if on_cpu(cases) else "",
        noise=number(None if (n := noise(cases)) is None else 100 * n), typical_noise=_typical_noise(cases),
        columns=COLUMNS, score_columns=SCORE_COLUMNS,
        ops=[score_cells(s) for s in ops], total=score_cells(total), figures=plots.all_figures(cases, ops),
        cases=[_case(r) for r in cases], sources=sources,
        bad=[r for r in cases if r.status in FAILED], live=live_lines(found), live_columns=LIVE_COLUMNS,
    )  # fmt: skip


def _card(total: Score, cases: Sequence[Row]) -> dict[str, Any]:
    """The verdict over all cases: the mean speedup with its interval, and how many cases are faster and slower."""
    clear = [r for r in cases if r.case.get("significant") and "speedup" in r.metrics]
    faster = sum(r.metrics["speedup"] > 1 for r in clear)
    low, high = total.ci95 or (0.0, math.inf)
    return {
        "big": "not measured" if total.speedup is None else f"{total.speedup:.3f}x",
        "css": "good" if low > 1 else "bad" if high < 1 else "soft",
        "text": total.why_none
        or ("PROVISIONAL, no score: " if total.provisional else "")
        + (f"95% interval {span(total.ci95)}, " if total.ci95 else "")
        + "weighted geometric mean",
        "timed": total.timed, "cases": total.cases, "failed": total.failed, "not_run": total.not_run,
        "faster": f"{faster} significantly faster, {len(clear) - faster} slower",
    }  # fmt: skip


def _case(row: Row) -> dict[str, Any]:
    """A case for the table and its details: all numbers, and the distribution of both sides."""
    from fk_bench.kernels import plots

    shown = ("kind", "name", "source", "times_us", "baseline_times_us")
    numbers = {k: f"{v:.6g}" for k, v in sorted(row.metrics.items())}
    numbers |= {f"{k}, 95%": span(v) for k, v in row.ci95.items()}
    return {
        "cells": cells(row), "ok": row.status is Status.OK, "failed": row.status in FAILED, "status": row.status.value,
        "reason": row.reason, "numbers": numbers, "case": {k: v for k, v in row.case.items() if k not in shown},
        "subject": row.subject.candidate or row.subject.provider or "", "baseline": row.baseline or "",
        "box": plots.boxes(row), "id": "-".join(key(row)),
    }  # fmt: skip


def _sources(found: Sequence[Row], run: Path | None) -> list[dict[str, Any]]:
    """Each candidate file with the findings of the static scan: the copy in the run, or else the original."""
    scans: dict[str, list[str]] = {}
    for row in found:
        if row.subject.candidate:
            said = row.case.get("scan") or []
            kept = scans.setdefault(row.subject.candidate, [])
            kept += [str(s) for s in (said if isinstance(said, list) else [said]) if str(s) not in kept]
    sources = []
    for name, findings in scans.items():
        places = [Path(name)] if run is None else [run / "candidates" / Path(name).name, Path(name)]
        place = next((p for p in places if p.is_file()), None)
        text = f"{name} no longer exists" if place is None else place.read_text(errors="replace")
        shown = printable(text, _MAX_SOURCE, lines=True)
        sources.append({"name": printable(name), "text": shown, "scan": [printable(f) for f in findings]})
    return sources
