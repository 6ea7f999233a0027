"""The plots of a serve-compare report. Colours show hosts; dashed lines are lanes with our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fk_bench.core.pages import BLUE, GREEN, GREY, ORANGE, Figure, fragments, layout
from fk_bench.serving.config import Level
from fk_bench.serving.report.numbers import in_words, mean
from fk_bench.serving.report.requests import Outcomes
from fk_bench.serving.summary import Cell, LaneResult, highest

# One colour a host: solid as shipped, dashed with our kernels.
COLORS = {"vllm": BLUE, "sglang": ORANGE, "fastkernels": GREEN}
LABELS = {
    "output_tokens_per_s": "output tokens/s", "tokens_per_s_per_user": "tokens/s per user", "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms", "itl_ms": "ITL, ms", "e2el_ms": "E2EL, ms",
}  # fmt: skip
_POINTS = 400  # of a distribution's curve


def _style(lane: str) -> dict[str, Any]:
    host, _, patched = lane.partition("+")
    color = COLORS.get(host, GREY)
    line = {"color": color, "dash": "dash" if patched else "solid", "width": 2}
    marker = {"color": color, "size": 9, "symbol": "diamond-open" if patched else "circle"}
    return {"name": lane, "legendgroup": lane, "line": line, "marker": marker, "mode": "lines+markers"}


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
    return layout(figure, "tokens/s per user", unit)


def against_load(results: Sequence[LaneResult], metric: str) -> Any:
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
    return layout(figure, "load (c: requests in flight, rate: requests/s)", _unit(metric))


def percentiles(results: Sequence[LaneResult], level: Level, name: str) -> Any:
    """The percentiles of a latency that the requests support, for every lane at one load."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for cell in (c for r in results for c in r.cells if c.level == level):
        known = [(p, mean(cell, f"{name}_{p}")) for p in ("p50", "p90", "p95", "p99")]
        found = [(p, v) for p, v in known if v is not None]
        if found:
            patched = "+" in cell.lane
            color = _style(cell.lane)["marker"]["color"]
            marker = {
                "color": color,
                "opacity": 0.6 if patched else 1.0,
                "pattern": {"shape": "/" if patched else ""},
            }
            figure.add_bar(x=[p for p, _ in found], y=[v for _, v in found], name=cell.lane, marker=marker)
    return layout(figure, "percentile over requests, mean over rounds", LABELS[name])


def distribution(found: Sequence[Outcomes], level: Level, name: str) -> Any:
    """The share of requests of all rounds that were faster than a latency, for every lane at one load."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for one in (o for o in found if o.level == level):
        values = sorted(1e3 * v for v in (one.ttft_s if name == "ttft_ms" else one.e2el_s))
        if len(values) < 2:
            continue
        step = max(1, len(values) // _POINTS)
        kept = list(range(0, len(values), step))
        style = {**_style(one.lane), "mode": "lines"}
        style["line"] = {**style["line"], "shape": "hv"}
        figure.add_scatter(
            x=[values[i] for i in kept], y=[100 * (i + 1) / len(values) for i in kept],
            hovertemplate="%{y:.0f}% within %{x:.1f} ms", **style,
        )  # fmt: skip
    return layout(figure, LABELS[name], "% of requests")


def rounds(results: Sequence[LaneResult], level: Level, metric: str = "output_tokens_per_s") -> Any:
    """A metric round by round. A drift of the machine moves all lanes together."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for cell in (c for r in results for c in r.cells if c.level == level):
        numbered = [(r + 1, m[metric]) for r, m in sorted(cell.rounds.items()) if metric in m]
        if numbered:
            figure.add_scatter(x=[r for r, _ in numbered], y=[v for _, v in numbered], **_style(cell.lane))
    return layout(figure, "round", _unit(metric)).update_xaxes(dtick=1)


def _unit(metric: str) -> str:
    for name, label in LABELS.items():
        if metric.startswith(name):
            return label
    return metric


def all_figures(results: Sequence[LaneResult], found: Sequence[Outcomes] = ()) -> list[Figure]:
    """The figures of a serve-compare report."""
    levels = list(dict.fromkeys(cell.level for r in results for cell in r.cells))
    if not levels:
        return []
    top = highest(levels)
    at = in_words(top)
    figures = []
    if sum(level.plain for level in levels) > 1:  # a single point is no curve
        figures += [
            ("pareto", "Throughput against interactivity: up and right is better", pareto(results)),
            ("throughput", "Throughput by load", against_load(results, "output_tokens_per_s")),
            ("ttft", "Time to first token by load, median", against_load(results, "ttft_ms_p50")),
            ("tpot", "Time per output token by load, median", against_load(results, "tpot_ms_p50")),
            ("e2el", "End-to-end latency by load, median", against_load(results, "e2el_ms_p50")),
        ]
    figures += [
        ("rounds", f"Throughput round by round, {at}", rounds(results, top)),
        ("ttft-percentiles", f"Time to first token, {at}", percentiles(results, top, "ttft_ms")),
        ("itl-percentiles", f"Inter-token latency, {at}", percentiles(results, top, "itl_ms")),
        ("ttft-distribution", f"Requests by time to first token, {at}", distribution(found, top, "ttft_ms")),
        ("e2el-distribution", f"Requests by end-to-end latency, {at}", distribution(found, top, "e2el_ms")),
    ]
    others = sorted((v for v in levels if not v.plain and v != top), key=lambda v: v.order)
    for i, level in enumerate(others, start=1):
        title = f"Time to first token, {in_words(level)}"
        figures.append((f"ttft-percentiles-{i}", title, percentiles(results, level, "ttft_ms")))
    return fragments(figures)
