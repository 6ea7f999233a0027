"""The plots of a serve-compare report, made from summary cells only. Colours tell hosts apart, the dash our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .summary import Cell, LaneResult

# A palette that colour-blind readers can tell apart (Okabe and Ito); one colour a host, solid as it ships, dashed with ours.
COLORS = {"vllm": "#0072B2", "sglang": "#D55E00", "fastkernels": "#009E73"}
LABELS = {
    "output_tokens_per_s": "output tokens/s", "tokens_per_s_per_user": "tokens/s per user", "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms", "itl_ms": "ITL, ms", "e2el_ms": "E2EL, ms",
}  # fmt: skip


def _style(lane: str) -> dict[str, Any]:
    host, _, patched = lane.partition("+")
    color = COLORS.get(host, "#555555")
    line = {"color": color, "dash": "dash" if patched else "solid", "width": 2}
    marker = {"color": color, "size": 9, "symbol": "diamond-open" if patched else "circle"}
    return {"name": lane, "legendgroup": lane, "line": line, "marker": marker, "mode": "lines+markers"}


def _layout(figure: Any, title: str, x: str, y: str) -> Any:
    figure.update_layout(
        title=title, template="plotly_white", height=420, margin={"l": 70, "r": 20, "t": 50, "b": 55},
        legend={"orientation": "h", "y": -0.22}, font={"family": "system-ui, sans-serif", "size": 13},
    )  # fmt: skip
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def _errors(cells: Sequence[Cell], metric: str) -> dict[str, Any]:
    up = [cell.ci95[metric][1] - cell.mean[metric] if metric in cell.ci95 else 0.0 for cell in cells]
    return {"type": "data", "array": up, "visible": any(up), "thickness": 1}


def pareto(results: Sequence[LaneResult]) -> Any:
    """Throughput against interactivity, one point a load: up and to the right is better."""
    import plotly.graph_objects as go

    figure = go.Figure()
    x, y = "tokens_per_s_per_user", "output_tokens_per_s"
    if any("output_tokens_per_s_per_gpu" in cell.mean for r in results for cell in r.cells):
        y = "output_tokens_per_s_per_gpu"
    for result in results:
        points = [cell for cell in result.cells if x in cell.mean and y in cell.mean]
        if points:
            figure.add_scatter(
                x=[cell.mean[x] for cell in points], y=[cell.mean[y] for cell in points],
                error_x=_errors(points, x), error_y=_errors(points, y), text=[cell.level.label for cell in points],
                hovertemplate="%{text}: %{y:.1f} tok/s at %{x:.1f} tok/s per user", **_style(result.lane),
            )  # fmt: skip
    unit = "output tokens/s per GPU" if y.endswith("gpu") else "output tokens/s"
    return _layout(figure, "Throughput against interactivity (Pareto)", "tokens/s per user", unit)


def against_load(results: Sequence[LaneResult], metric: str, title: str) -> Any:
    """A metric over the loads, mean and 95% interval over rounds."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for result in results:
        points = [cell for cell in result.cells if metric in cell.mean]
        if points:
            figure.add_scatter(
                x=[cell.level.label for cell in points], y=[cell.mean[metric] for cell in points],
                error_y=_errors(points, metric), **_style(result.lane),
            )  # fmt: skip
    return _layout(figure, title, "load (c: requests in flight, rate: requests/s)", _unit(metric))


def percentiles(results: Sequence[LaneResult], name: str, title: str) -> Any:
    """p50, p90, p95 and p99 of a latency for every (lane, load)."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for result in results:
        style = _style(result.lane)
        for cell in result.cells:
            found = [
                (p, cell.mean[f"{name}_{p}"])
                for p in ("p50", "p90", "p95", "p99")
                if f"{name}_{p}" in cell.mean
            ]
            if found:
                label = f"{result.lane} {cell.level.label}"
                figure.add_bar(
                    x=[p for p, _ in found], y=[v for _, v in found], name=label,
                    marker={"color": style["marker"]["color"], "opacity": 0.55 if "+" in result.lane else 0.95,
                            "pattern": {"shape": "/" if "+" in result.lane else ""}},
                )  # fmt: skip
    return _layout(figure, title, "percentile over requests, mean over rounds", LABELS[name])


def rounds(results: Sequence[LaneResult], metric: str = "output_tokens_per_s") -> Any:
    """A metric round by round: a drift of the machine moves all lanes together."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for result in results:
        for cell in result.cells:
            numbered = [(r + 1, m[metric]) for r, m in sorted(cell.rounds.items()) if metric in m]
            if numbered:
                style = {**_style(result.lane), "name": f"{result.lane} {cell.level.label}"}
                figure.add_scatter(x=[r for r, _ in numbered], y=[v for _, v in numbered], **style)
    figure = _layout(figure, "Round by round", "round", _unit(metric))
    return figure.update_xaxes(dtick=1)


def _unit(metric: str) -> str:
    for name, label in LABELS.items():
        if metric.startswith(name):
            return label
    return metric


def all_figures(results: Sequence[LaneResult]) -> list[tuple[str, str]]:
    """[(id, HTML fragment)]; the first one carries the whole of plotly.js, so that the page loads nothing."""
    figures = [
        ("pareto", pareto(results)),
        ("ttft", against_load(results, "ttft_ms_p50", "Time to first token, median")),
        ("tpot", against_load(results, "tpot_ms_p50", "Time per output token, median")),
        ("ttft-percentiles", percentiles(results, "ttft_ms", "TTFT percentiles")),
        ("itl-percentiles", percentiles(results, "itl_ms", "Inter-token latency percentiles")),
        ("rounds", rounds(results)),
    ]
    made = []
    for i, (name, figure) in enumerate(f for f in figures if f[1].data):
        html = figure.to_html(
            full_html=False, include_plotlyjs=i == 0, include_mathjax=False, div_id=f"plot-{name}",
            config={"displaylogo": False, "responsive": True},
        )  # fmt: skip
        made.append((name, html))
    return made
