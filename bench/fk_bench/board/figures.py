"""Figures of the board as SVG, without scripts: fast_p curves, and speedups by architecture in panels of categories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fk_bench.board.standings import fast_p

# Okabe and Ito, without yellow; dashes tell lines of one colour apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("", "6 3", "2 3")
MOST_P = 3.0
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 620, 260, 44, 14, 40, 18
BAR, GAP, PANEL_GAP = 26, 8, 28


def curves(sets: Mapping[str, Sequence[float]], title: str) -> str:
    """fast_p: for each set the share of cases that are right and faster than p; '' without cases."""
    sets = {name: speeds for name, speeds in sets.items() if speeds}
    if not sets:
        return ""
    steps = [i * MOST_P / 60 for i in range(61)]
    plot = WIDTH - LEFT - 16
    height = HEIGHT + LEGEND * math.ceil(len(sets) / 2)

    def x(p: float) -> float:
        return LEFT + plot * p / MOST_P

    def y(share: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    parts = [_line(x(0), y(s), x(MOST_P), y(s), "grid") for s in (0.0, 0.25, 0.5, 0.75, 1.0)]
    parts += [_text(LEFT - 6, y(s) + 4, f"{s:.0%}", "end") for s in (0.0, 0.5, 1.0)]
    parts += [_text(x(p), y(0) + 16, f"{p:g}", "middle") for p in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]
    parts += [
        _line(x(1), y(0), x(1), y(1), "one"),
        _text(x(MOST_P / 2), y(0) + 32, "p: faster than p times the baseline", "middle"),
    ]
    for n, (name, speeds) in enumerate(sets.items()):
        points = " ".join(f"{x(p):.1f},{y(fast_p(speeds, p)):.1f}" for p in steps)
        style = (
            f'stroke="{COLORS[n % len(COLORS)]}" stroke-dasharray="{DASHES[n // len(COLORS) % len(DASHES)]}"'
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke-width="2" {style}><title>{escape(name)}</title></polyline>'
        )
        at_x, at_y = LEFT + (n % 2) * plot / 2, HEIGHT + LEGEND * (n // 2) + 8
        parts.append(
            f'<line x1="{at_x:.0f}" x2="{at_x + 22:.0f}" y1="{at_y - 4}" y2="{at_y - 4}" stroke-width="2" {style}/>'
        )
        label = f"{name}: fast_1 {fast_p(speeds, 1.0):.0%} of {len(speeds)}"
        parts.append(_text(at_x + 28, at_y, label if len(label) < 44 else label[:43] + "…", "start"))
    return _svg(WIDTH, height, title, parts)


def by_architecture(panels: Mapping[str, Mapping[str, float]], title: str) -> str:
    """Bars of the speedup of each model, in a panel for each category with its geometric mean as a dashed line."""
    panels = {name: bars for name, bars in panels.items() if bars}
    if not panels:
        return ""
    values = [v for bars in panels.values() for v in bars.values()]
    low, high = min(0.9, *values) * 0.97, max(1.1, *values) * 1.05
    top, plot, below = 34, 170, 92

    def y(value: float) -> float:
        return top + plot * (high - value) / (high - low)

    parts: list[str] = []
    left = float(LEFT)
    for n, (name, bars) in enumerate(panels.items()):
        width = max(len(bars) * (BAR + GAP), 7.5 * len(name))
        parts.append(_text(left, top - 14, name, "start", weight="600"))
        parts.append(_line(left, y(1), left + width, y(1), "one"))
        mean = math.exp(sum(math.log(v) for v in bars.values()) / len(bars))
        color = COLORS[n % len(COLORS)]
        for i, (model, value) in enumerate(bars.items()):
            x, a, b = left + i * (BAR + GAP), y(max(value, 1.0)), y(min(value, 1.0))
            parts.append(
                f'<rect x="{x:.1f}" y="{a:.1f}" width="{BAR}" height="{max(b - a, 1):.1f}" fill="{color}">'
                f"<title>{escape(model)}: {value:.3f}</title></rect>"
            )
            parts.append(_text(x + BAR / 2, a - 3, f"{value:.2f}", "middle", size=10))
            parts.append(
                f'<text transform="translate({x + BAR / 2 + 4:.1f},{top + plot + 8}) rotate(-40)" text-anchor="end" '
                f'font-size="11">{escape(model if len(model) < 17 else model[:16] + "…")}</text>'
            )
        parts.append(
            f'<line class="mean" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y(mean):.1f}" y2="{y(mean):.1f}"/>'
        )
        parts.append(_text(left + width + 2, y(mean) + 4, f"{mean:.2f}", "start", size=10))
        left += width + PANEL_GAP
    return _svg(max(left, 240), top + plot + below, title, parts)


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
