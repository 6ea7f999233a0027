"""The plots of docs/models.md, from its tables: a line per model, a dot per load, a mark for the paper's figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from fk_bench.core.terminal.flags import ConfigError
from fk_bench.explain.tables import Table
from fk_bench.tables import speeds
from fk_bench.tables.origin import Files

COLORS = ("#3b6fb6", "#e08a3c", "#5a9a5a", "#8c8c8c", "#b05ab0", "#c0504d", "#4db3b3", "#8a6d3b")
LEFT, TOP, LINE, PLOT, RIGHT, BOTTOM = 300, 78, 22, 430, 20, 30
LEGEND = 20  # from one line of the legend to the next
STEP = 0.2  # between grid lines
TEXT = 'font-family="system-ui, sans-serif" fill="#24292f"'


def text(files: Files) -> str:
    """Text models: output tokens/s over stock vLLM's, of patched vLLM and of our engine."""
    return _plot(
        next(speeds.text(files), None), "Output tokens/s over stock vLLM's", ("patched,", "our engine,"), 2
    )


def images(files: Files) -> str:
    """Image models: images per second over the host's fastest lane."""
    return _plot(next(speeds.images(files), None), "Images per second, patched over the host", ("batch",), 4)


def _plot(table: Table | None, title: str, ratios: Sequence[str], labels: int) -> str:
    """ratios: how their columns' names begin. labels: number of columns that name a line. Raises ConfigError."""
    if table is None:
        raise ConfigError(f"{title}: no rows for the plot")
    _, columns, cells = table
    shown = [i for i, name in enumerate(columns) if name.startswith(tuple(ratios))]
    paper = columns.index("paper")
    values = [float(row[i]) for row in cells for i in (*shown, paper) if row[i]]
    low, high = math.floor(min(values) / STEP) * STEP, math.ceil(max(values) / STEP) * STEP
    width = LEFT + PLOT + RIGHT
    legend = [*((columns[i], c) for i, c in zip(shown, COLORS, strict=False)), ("paper", "#24292f")]
    places, lines = _placed([name for name, _ in legend], width)
    top = TOP + LEGEND * (lines - 1)
    height = top + LINE * len(cells) + BOTTOM

    def x(value: float) -> float:
        return LEFT + PLOT * (value - low) / (high - low)

    parts = [_text(16, 24, title, 15, "start", "600")]
    for (name, color), (at, line) in zip(legend, places, strict=True):
        down = 46 + LEGEND * line
        parts.append(
            _mark(at + 5, down, color, name == "paper") + _text(at + 14, down + 4, name, 11, "start")
        )
    for i in range(round((high - low) / STEP) + 1):
        value = low + i * STEP
        color = "#57606a" if abs(value - 1) < STEP / 2 else "#d0d7de"
        parts.append(
            f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top - 8}" y2="{height - BOTTOM}" stroke="{color}"/>'
        )
        parts.append(_text(x(value), height - 12, f"{value:.1f}x", 11))
    for n, row in enumerate(cells):
        y = top + LINE * (n + 0.5)
        parts.append(_text(LEFT - 10, y + 4, " ".join(row[:labels]), 11, "end"))
        for i, color in zip((*shown, paper), (*COLORS[: len(shown)], "#24292f"), strict=True):
            if row[i]:
                parts.append(
                    _mark(x(float(row[i])), y, color, i == paper, f"{row[0]}, {columns[i]}: {row[i]}")
                )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    frame = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", frame, *parts, "</svg>", ""])


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
