"""The plots of a kernels report, made from its rows: speedups, the roofline, and the spread of a case's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fk_bench.core.pages import BLUE, GREEN, GREY, ORANGE, YELLOW, Figure, fragments, layout
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge.clock import roofline

if TYPE_CHECKING:
    from fk_bench.core.scores import Score

FASTER, SLOWER, SAME = GREEN, ORANGE, GREY  # SAME: no significant difference
CANDIDATE, BASELINE = BLUE, YELLOW


def _color(value: float, interval: tuple[float, float] | None) -> str:
    if interval is None or interval[0] <= 1.0 <= interval[1]:
        return SAME
    return FASTER if value > 1.0 else SLOWER


def _bars(lines: Sequence[tuple[str, float, tuple[float, float] | None]]) -> Any:
    """Horizontal bars with intervals and a line at 1.0; the first is on top."""
    import plotly.graph_objects as go

    figure = go.Figure()
    if lines:
        bounds = [interval or (value, value) for _, value, interval in lines]
        values = [value for _, value, _ in lines]
        figure.add_bar(
            y=[name for name, _, _ in lines], x=values, orientation="h", showlegend=False,
            marker={"color": [_color(value, interval) for _, value, interval in lines]},
            error_x={
                "type": "data", "symmetric": False, "thickness": 1,
                "array": [high - v for v, (_, high) in zip(values, bounds, strict=True)],
                "arrayminus": [v - low for v, (low, _) in zip(values, bounds, strict=True)],
            },
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )  # fmt: skip
        figure.add_vline(x=1.0, line={"color": GREY, "width": 1, "dash": "dash"})
    layout(figure, "speedup", "")
    figure.update_yaxes(autorange="reversed", automargin=True, rangemode="normal")
    return figure.update_layout(height=max(240, 130 + 22 * len(lines)))


def by_op(scores: Sequence[Score]) -> Any:
    lines = [(s.op, s.speedup, s.ci95) for s in scores if s.speedup is not None]
    return _bars(lines)


def by_case(cases: Sequence[Row]) -> Any:
    timed = [r for r in cases if r.status is Status.OK and "speedup" in r.metrics]
    names = [f"{r.subject.op} {r.case.get('name', '')} ({r.case.get('source', '')})" for r in timed]
    lines = [(n, r.metrics["speedup"], r.ci95.get("speedup")) for n, r in zip(names, timed, strict=True)]
    return _bars(lines)


def roof(cases: Sequence[Row]) -> Any:
    """Operations per byte against the reached rate, for both sides, below the machine's roofs if known."""
    import plotly.graph_objects as go

    figure = go.Figure()
    points = [
        r for r in cases if r.status is Status.OK and r.metrics.get("tflops") and r.metrics.get("gb_per_s")
    ]
    if not points:
        return figure
    x = [1e3 * r.metrics["tflops"] / r.metrics["gb_per_s"] for r in points]
    text = [f"{r.subject.op} {r.case.get('name', '')}" for r in points]
    mine = [r.metrics["tflops"] for r in points]
    theirs = [
        r.metrics["tflops"] * r.metrics["speedup"] ** -1 if r.metrics.get("speedup") else None for r in points
    ]
    for title, y, color, symbol in (
        ("baseline", theirs, BASELINE, "circle-open"),
        ("this", mine, CANDIDATE, "circle"),
    ):
        figure.add_scatter(
            x=x, y=y, text=text, mode="markers", name=title, marker={"color": color, "symbol": symbol, "size": 8},
            hovertemplate="%{text}: %{y:.3g} TFLOP/s at %{x:.3g} operations per byte",
        )  # fmt: skip
    gpu = roofline.peaks(points[0].machine.gpu) if points[0].case.get("timer") != "cpu" else None
    for dtype in dict.fromkeys(str(r.case.get("dtype", "")) for r in points):
        rate, ridge = (gpu.flops_per_s(dtype), roofline.ridge(dtype, gpu)) if gpu else (None, None)
        if gpu and rate and ridge:
            low, high = min(x) / 2, max(*x, 4 * ridge)
            figure.add_scatter(
                x=[low, ridge, high], y=[low * gpu.gb_per_s / 1e3, rate / 1e12, rate / 1e12], mode="lines",
                name=f"{gpu.name}, {dtype}", line={"width": 1},
            )  # fmt: skip
    layout(figure, "operations per byte of compulsory traffic", "TFLOP/s")
    figure.update_xaxes(type="log")
    return figure.update_yaxes(type="log", rangemode="normal")


def all_figures(cases: Sequence[Row], scores: Sequence[Score]) -> list[Figure]:
    """The non-empty figures."""
    legend = "green: faster, orange: slower, grey: no significant difference"
    return fragments([
        ("ops", f"Speedup of each op: geometric mean, weighted ({legend})", by_op(scores)),
        ("roofline", "Roofline", roof(cases)),
        ("cases", f"Speedup of each case ({legend})", by_case(cases)),
    ])  # fmt: skip


def boxes(row: Row) -> list[dict[str, Any]]:
    """p20, p50 and p80 of both sides, and single batches if the row has them, as positions from 0 to 100."""
    found = []
    for name, prefix, samples in (
        ("this", "time_us", "times_us"),
        (row.baseline, "baseline_us", "baseline_times_us"),
    ):
        known = [row.metrics.get(f"{prefix}_p{p}") for p in (20, 50, 80)]
        if all(v is not None and v > 0 for v in known):
            found.append(
                (name or "baseline", [float(v) for v in known if v is not None], row.case.get(samples) or [])
            )
    top = max((max(*p, *(float(s) for s in dots)) for _, p, dots in found), default=0.0)
    if top <= 0:
        return []
    return [
        {
            "name": name, "low": 95 * p[0] / top, "middle": 95 * p[1] / top, "high": 95 * p[2] / top,
            "dots": [95 * float(s) / top for s in dots], "text": f"{p[1]:.4g} us [{p[0]:.4g} - {p[2]:.4g}]",
        }
        for name, p, dots in found
    ]  # fmt: skip
