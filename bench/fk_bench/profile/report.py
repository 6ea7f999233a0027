"""Tables and page of a profile, made from its rows; the timeline from its spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fk_bench.core import pages
from fk_bench.core.rows import Row
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.report import CPU_MARK
from fk_bench.profile.data import TIMELINE, Profile

SHOWN = 25  # kernels of a table
LINES = {
    "wall_us": "from first to last kernel, us", "busy_us": "kernels run, us", "gaps": "gaps between kernels",
    "gaps_us": "no kernel runs, us", "largest_gap_us": "largest gap, us", "launches": "launches",
    "floor_us": "floor, us", "gb_per_s": "GB/s", "memory_pct": "of the memory's peak, %", "tflops": "TFLOP/s",
    "flops_pct": "of the units' peak, %",
}  # fmt: skip
KERNELS = {
    "launches": "launches", "time_us": "us", "share": "% of time", "memory_pct": "memory %", "tensor_pct": "tensor %",
    "occupancy_pct": "occupancy %", "limit": "limited by", "registers": "registers", "spills": "spills",
    "shared_kib": "shared KiB", "stalls": "stalls",
}  # fmt: skip
Table = tuple[str, list[str], list[list[str]]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """(title, columns, cells): the call or step, ops against their floors, and kernels by time."""
    first = rows[0]
    subject = first.subject.op or first.subject.model
    unit = "call" if first.subject.op else "step"
    about = [[f"{LINES[k]} per {unit}" if k in ("gaps", "launches") else LINES[k], _number(v)]
             for k, v in first.metrics.items()]  # fmt: skip
    name = first.case.get("case") or f"{first.case.get('phase')}, batch {first.case.get('batch')}"
    found: list[Table] = [(f"{subject}, {name}: one {unit}, {first.case['tool']}", ["", ""], about)]
    ops = [r for r in rows if r.kind == "op"]
    if ops and not first.subject.op:
        total = sum(r.metrics["time_us"] for r in ops) or 1.0
        cells = [
            [str(r.subject.op), _number(r.metrics["calls"]), _number(r.metrics["time_us"]),
             _number(100 * r.metrics["time_us"] / total), _number(r.metrics.get("floor_us")), _reached(r)]
            for r in ops
        ]  # fmt: skip
        where = f"floor us, {first.case['floors_of']}"
        found.append(("Ops of the step", ["op", "calls", "us", "% of ops", where, "floor / time %"], cells))
    kernels = [r for r in rows if r.kind == "kernel"]
    if kernels:
        total = sum(r.metrics["time_us"] for r in kernels) or 1.0
        lines = [
            {**r.metrics, "share": 100 * r.metrics["time_us"] / total, **{k: r.case[k] for k in ("limit", "stalls")}}
            for r in kernels[:SHOWN]
        ]  # fmt: skip
        shown = [k for k in KERNELS if any(line.get(k) not in (None, "") for line in lines)]
        what = "Kernels" if first.case["device"] == "cuda" else "Operators"
        title = f"{what} by time" + (f", the first {SHOWN} of {len(kernels)}" if len(kernels) > SHOWN else "")
        names = [printable(r.case["name"])[:100] for r in kernels[:SHOWN]]
        cells = [[n, *(_number(line.get(k)) for k in shown)] for n, line in zip(names, lines, strict=True)]
        found.append((title, ["name", *(KERNELS[k] for k in shown)], cells))
    return found


def write(folder: Path, rows: Sequence[Row], found: Profile) -> Path:
    """Write the page, a self-contained file; returns its path."""
    page = folder / "report.html"
    title, *_ = tables(rows)[0]
    text = pages.render(
        "profile.html", title=title, first=rows[0], when=pages.period(rows), remark=rows[0].reason,
        cpu=CPU_MARK if found.device == "cpu" else "", tables=tables(rows), figures=_timeline(found),
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")
    return page


def _timeline(found: Profile) -> list[pages.Figure]:
    import plotly.graph_objects as go

    spans = found.spans[:TIMELINE]
    figure = go.Figure()
    if spans:
        figure.add_bar(
            base=[s.start_us for s in spans], x=[s.end_us - s.start_us for s in spans],
            y=[s.op or "no op of ours" for s in spans], orientation="h",
            hovertext=[printable(s.name)[:100] for s in spans], marker_color=pages.BLUE, marker_line_width=0,
        )  # fmt: skip
    pages.layout(figure, "us", "")
    return pages.fragments([("timeline", "Timeline", figure)])


def _reached(row: Row) -> str:
    floor, time = row.metrics.get("floor_us"), row.metrics["time_us"]
    comparable = row.case["device"] == "cuda" and floor is not None and time > 0
    return _number(100 * floor / time) if comparable and floor is not None else ""


def _number(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.4g}"
