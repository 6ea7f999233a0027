"""The plots of docs/models.md, from its tables: a line per model, a dot per load, a mark for the paper's figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e import ratios
from fk_bench.explain.tables import Table
from fk_bench.tables import architectures, patch, speeds
from fk_bench.tables.origin import Files

COLORS = ("#3b6fb6", "#e08a3c", "#5a9a5a", "#8c8c8c", "#b05ab0", "#c0504d", "#4db3b3", "#8a6d3b")
LEFT, TOP, LINE, PLOT, RIGHT, BOTTOM = 300, 78, 22, 430, 20, 30
LEGEND = 20  # from one line of the legend to the next
STEPS, MOST = (0.1, 0.2, 0.5, 1.0), 10  # between grid lines, and how many there are at most
WIDE = 8  # greatest over least value from which the axis is logarithmic
DECADES = 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0
FORMAT, FORMAT_RATIOS = (0, 1, 2, 3), ("1 x", "8 x", "32 x", "64 x")  # of the tables of formats
TEXT = 'font-family="system-ui, sans-serif" fill="#24292f"'


@dataclass(frozen=True)
class Plot:
    """A line for each name with a value of each series; the last series may be the paper's."""

    title: str
    series: Sequence[str]
    names: Sequence[str]
    tips: Sequence[str]
    values: Sequence[Sequence[str]]


def text(files: Files) -> str:
    """Text models: output tokens/s over stock vLLM's, of patched vLLM and of our engine."""
    return _plot("Output tokens/s over stock vLLM's", speeds.text(files), ("patched,", "our engine,"), (0, 1))


def patched(files: Files) -> str:
    """Patched hosts: time per token by number of requests, and input tokens/s of prompts."""
    columns = (*map(str, speeds.PATCHED), "prompts")
    return _plot(
        "Patched host over the same host, by number of requests", speeds.patched(files), columns, (0, 1, 2)
    )


def prompts(files: Files) -> str:
    """Prompts: input tokens/s of patched vLLM and of our engine over stock vLLM's."""
    found = [table for table in patch.prompts(files) if ratios.METRICS[ratios.INPUT][0] in table[0]]
    tables = []
    for title, columns, cells in found:  # a table of each host
        host = title.partition(": ")[2].partition(",")[0]
        tables.append((title, ["Host", *columns], [[host, *row] for row in cells]))
    title = "Prompts, input tokens/s over the stock host's"
    return _plot(title, tables, ("patched, times", "our engine, times"), (0, 1, 2))


def formats(files: Files) -> str:
    """Number formats: vLLM's time per token over ours, by load."""
    return _plot(
        "vLLM's time per output token over ours", [*speeds.formats(files)][:1], FORMAT_RATIOS, FORMAT
    )


def format_rates(files: Files) -> str:
    """Number formats: our output tokens/s over vLLM's, by load."""
    return _plot(
        "Output tokens/s of our engine over vLLM's", [*speeds.formats(files)][1:2], FORMAT_RATIOS, FORMAT
    )


def images(files: Files) -> str:
    """Image models: images per second over the host's fastest lane."""
    tables = (table for table in speeds.images(files) if table[0].startswith("Images"))
    return _plot("Images per second, patched over the host", tables, ("batch",), (0, 1, 2, 3))


def pipelines(files: Files) -> str:
    """Pipelines of images: seconds per batch of the host over the patched one."""
    tables = (table for table in speeds.images(files) if table[0].startswith("Seconds"))
    return _plot("Seconds per batch of images, host / patched", tables, ("host / patched",), (0, 2, 3, 4))


def others(files: Files) -> str:
    """Other architectures: the reference's milliseconds over ours."""
    return _plot("Milliseconds of the reference over ours", architectures.table(files), ("speedup",), (0, 1))


def _plot(title: str, tables: Iterable[Table], begin: Sequence[str], labels: Sequence[int]) -> str:
    """Draw the tables. begin: how their ratios' columns begin. labels: columns that name a line.

    Raises ConfigError without a table.
    """
    series, names, tips, lines = list[str](), list[str](), list[str](), list[dict[str, str]]()
    for _, columns, cells in tables:
        shown = [name for name in columns if name.startswith(tuple(begin))]
        series += [
            name for name in (*shown, *(["paper"] if "paper" in columns else [])) if name not in series
        ]
        for row in cells:
            found = dict(zip(columns, row, strict=True))
            named = [columns[i] for i in labels]
            names.append(" ".join(f"{c} {found[c]}" if found[c].isdigit() else found[c] for c in named))
            tips.append(found[next(c for c in columns if c != "Host")])
            lines.append(found)
    if not lines:
        raise ConfigError(f"{title}: no rows for the plot")
    values = [[found.get(name, "") for name in series] for found in lines]
    return _drawn(Plot(title, series, names, tips, values))


def _drawn(plot: Plot) -> str:
    x, ticks = axis([float(value) for row in plot.values for value in row if value])
    width = LEFT + PLOT + RIGHT
    colors = ["#24292f" if s == "paper" else COLORS[i % len(COLORS)] for i, s in enumerate(plot.series)]
    places, lines = _placed(plot.series, width)
    top = TOP + LEGEND * (lines - 1)
    height = top + LINE * len(plot.names) + BOTTOM
    parts = [_text(16, 24, plot.title, 15, "start", "600")]
    for name, color, (at, line) in zip(plot.series, colors, places, strict=True):
        down = 46 + LEGEND * line
        parts.append(
            _mark(at + 5, down, color, name == "paper") + _text(at + 14, down + 4, name, 11, "start")
        )
    for value in ticks:
        color = "#57606a" if math.isclose(value, 1) else "#d0d7de"
        parts.append(
            f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top - 8}" y2="{height - BOTTOM}" stroke="{color}"/>'
        )
        parts.append(_text(x(value), height - 12, f"{value:.1f}x", 11))
    for n, (name, tip, values) in enumerate(zip(plot.names, plot.tips, plot.values, strict=True)):
        y = top + LINE * (n + 0.5)
        parts.append(_text(LEFT - 10, y + 4, name, 11, "end"))
        for ratio, color, series in zip(values, colors, plot.series, strict=True):
            if ratio:
                parts.append(_mark(x(float(ratio)), y, color, series == "paper", f"{tip}, {series}: {ratio}"))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    frame = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(plot.title)}</title>", frame, *parts, "</svg>", ""])


def axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Pixels of a value, and the grid: even steps, or a logarithmic axis if the values are far apart."""
    low, high = min(*values, 1.0), max(*values, 1.0)
    if high / low > WIDE:
        ticks = [t for t in DECADES if low / 2 < t < high * 2]
    else:
        step = next(step for step in STEPS if (high - low) / step <= MOST)
        ticks = [n * step for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
    scale = math.log if high / low > WIDE else float
    first, last = scale(ticks[0]), scale(ticks[-1])
    return lambda value: LEFT + PLOT * (scale(value) - first) / (last - first), ticks


def _placed(names: Sequence[str], width: float) -> tuple[list[tuple[float, int]], int]:
    """Where each name of the legend stands, (x, line), and the number of lines."""
    found: list[tuple[float, int]] = []
    at, line = 16.0, 0
    for name in names:
        wide = 34 + 6.2 * len(name)
        if at + wide > width and found:
            at, line = 16.0, line + 1
        found.append((at, line))
        at += wide
    return found, line + 1


def _mark(x: float, y: float, color: str, paper: bool, title: str = "") -> str:
    """A dot, or for the paper's figure a hollow diamond."""
    inside = f"<title>{escape(title)}</title>"
    if paper:
        points = f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f} {x - 5:.1f},{y:.1f}"
        return (
            f'<polygon points="{points}" fill="none" stroke="{color}" stroke-width="1.5">{inside}</polygon>'
        )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}" fill-opacity="0.75">{inside}</circle>'


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {TEXT} {style}>{escape(text)}</text>'
