"""The plots of a serve-compare report. Colours show hosts; dashed lines are lanes with our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fk_bench.serving.config import Level
from fk_bench.serving.summary import Cell, LaneResult, highest

# Okabe and Ito, distinguishable for colour-blind readers. One colour a host: solid as shipped, dashed with our kernels.
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


def layout(figure: Any, title: str, x: str, y: str) -> Any:
    """The layout that all figures of our reports share."""
    figure.update_layout(
        title=title, template="plotly_white", height=420, margin={"l": 70, "r": 20, "t": 50, "b": 55},
        legend={"orientation": "h", "y": -0.22}, font={"family": "system-ui, sans-serif", "size": 13},
    )  # fmt: skip
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def _curve(result: LaneResult) -> list[Cell]:
    """The cells on one curve: only constant loads of the run's requests."""
    return [cell for cell in result.cells if cell.level.plain]


def _errors(cells: Sequence[Cell], metric: str) -> dict[str, Any]:
    half = [cell.ci95[metric][1] - cell.mean[metric] if metric in cell.ci95 else 0.0 for cell in cells]
    down = [min(h, cell.mean[metric]) for h, cell in zip(half, cells)]  # noqa: B905  (no metric is negative)
    return {"type": "data", "array": half, "arrayminus": down, "visible": any(half), "thickness": 1}


def pareto(results: Sequence[LaneResult]) -> Any:
    """Throughput against interactivity, one point per load of the run's lengths: up and right is better."""
    import plotly.graph_objects as go

    figure = go.Figure()
    x, y = "tokens_per_s_per_user", "output_tokens_per_s"
    if any("output_tokens_per_s_per_gpu" in cell.mean for r in results for cell in r.cells):
        y = "output_tokens_per_s_per_gpu"
    for result in results:
        points = [cell for cell in _curve(result) if x in cell.mean and y in cell.mean]
        if points:
            figure.add_scatter(
                x=[cell.mean[x] for cell in points], y=[cell.mean[y] for cell in points],
                error_x=_errors(points, x), error_y=_errors(points, y), text=[cell.level.label for cell in points],
                hovertemplate="%{text}: %{y:.1f} tok/s at %{x:.1f} tok/s per user", **_style(result.lane),
            )  # fmt: skip
    unit = "output tokens/s per GPU" if y.endswith("gpu") else "output tokens/s"
    return layout(figure, "Throughput against interactivity (Pareto)", "tokens/s per user", unit)


def against_load(results: Sequence[LaneResult], metric: str, title: str) -> Any:
    """A metric over the loads of the run's lengths: mean and 95% interval over rounds."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for result in results:
        points = [cell for cell in _curve(result) if metric in cell.mean]
        if points:
            figure.add_scatter(
                x=[cell.level.label for cell in points], y=[cell.mean[metric] for cell in points],
                error_y=_errors(points, metric), **_style(result.lane),
            )  # fmt: skip
    return layout(figure, title, "load (c: requests in flight, rate: requests/s)", _unit(metric))


def percentiles(results: Sequence[LaneResult], level: Level, name: str, title: str) -> Any:
    """p50, p90, p95 and p99 of a latency for every lane at one load."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for cell in (c for r in results for c in r.cells if c.level == level):
        found = [(p, cell.mean.get(f"{name}_{p}")) for p in ("p50", "p90", "p95", "p99")]
        if found[0][1] is not None:
            patched = "+" in cell.lane
            color = _style(cell.lane)["marker"]["color"]
            marker = {
                "color": color,
                "opacity": 0.6 if patched else 1.0,
                "pattern": {"shape": "/" if patched else ""},
            }
            figure.add_bar(x=[p for p, _ in found], y=[v for _, v in found], name=cell.lane, marker=marker)
    return layout(
        figure, f"{title} at {level.label}", "percentile over requests, mean over rounds", LABELS[name]
    )


def rounds(results: Sequence[LaneResult], level: Level, metric: str = "output_tokens_per_s") -> Any:
    """A metric round by round. A drift of the machine moves all lanes together."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for cell in (c for r in results for c in r.cells if c.level == level):
        numbered = [(r + 1, m[metric]) for r, m in sorted(cell.rounds.items()) if metric in m]
        figure.add_scatter(x=[r for r, _ in numbered], y=[v for _, v in numbered], **_style(cell.lane))
    figure = layout(figure, f"Throughput round by round at {level.label}", "round", _unit(metric))
    return figure.update_xaxes(dtick=1)


def _unit(metric: str) -> str:
    for name, label in LABELS.items():
        if metric.startswith(name):
            return label
    return metric


def all_figures(results: Sequence[LaneResult]) -> list[tuple[str, str]]:
    """[(id, HTML fragment)] of a serve-compare report."""
    levels = list(dict.fromkeys(cell.level for r in results for cell in r.cells))
    if not levels:
        return []
    top = highest(levels)
    figures = [
        ("pareto", pareto(results)),
        ("ttft", against_load(results, "ttft_ms_p50", "Time to first token, median")),
        ("tpot", against_load(results, "tpot_ms_p50", "Time per output token, median")),
        ("e2el", against_load(results, "e2el_ms_p50", "End-to-end latency, median")),
        ("ttft-percentiles", percentiles(results, top, "ttft_ms", "Time to first token")),
        ("itl-percentiles", percentiles(results, top, "itl_ms", "Inter-token latency")),
        ("rounds", rounds(results, top)),
    ]
    others = sorted((v for v in levels if not v.own_lengths and v != top), key=lambda v: v.order)
    for i, level in enumerate(others, start=1):
        name = f"ttft-percentiles-{i}"
        figures.append((name, percentiles(results, level, "ttft_ms", "Time to first token")))
    return fragments(figures)


def fragments(figures: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """[(id, HTML fragment)] of the non-empty figures. The first one contains plotly.js, so that the page loads
    nothing."""
    made = []
    for i, (name, figure) in enumerate(f for f in figures if f[1].data):
        html = figure.to_html(
            full_html=False, include_plotlyjs=i == 0, include_mathjax=False, div_id=f"plot-{name}",
            default_width="100%", default_height=f"{figure.layout.height or 420}px",
            config={"displaylogo": False, "responsive": True},
        )  # fmt: skip
        made.append((name, html))
    return made
