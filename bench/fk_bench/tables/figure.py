"""The README's figure as SVG: how much faster each patched host is than itself, by model and number of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from fk_bench.core.terminal.flags import ConfigError
from fk_bench.tables.origin import Files
from fk_bench.tables.servers import TPOT, LaneAndBase, patched

COLORS = ("#3b6fb6", "#e08a3c", "#5a9a5a")  # by host, in the order of the rows
BAR, GAP, GROUP_GAP = 22, 2, 14  # width of a bar, between the bars of a group, between groups
LEFT, TOP, PLOT, BOTTOM = 44, 74, 190, 44  # margins and height of the plots
PANEL_GAP = 26
STEP = 0.1  # between grid lines
CHARACTER = 7.0  # width of a character of a panel's title
TEXT = 'font-family="system-ui, sans-serif" fill="#24292f"'


def speedup(files: Files) -> str:
    """Return the figure. Raises ConfigError if the rows have no patched host."""
    panels: dict[str, list[LaneAndBase]] = {}
    for pair in patched(files):
        if pair.lane.level.own_lengths and pair.ratio(TPOT) is not None:
            panels.setdefault(pair.model, []).append(pair)
    if not panels:
        raise ConfigError(f"{', '.join(files)}: no rows of a host and the same host patched")
    hosts = list(dict.fromkeys(p.host for found in panels.values() for p in found))
    ratios = [_ratio(p) for found in panels.values() for p in found]
    low = min(1.0, math.floor(min(ratios) / STEP) * STEP)
    high = math.ceil(max(ratios) / STEP + 0.3) * STEP
    parts, x = [], float(LEFT)
    for model, found in panels.items():
        drawn, width = _panel(model, found, hosts, x, low, high)
        parts += drawn
        x += width + PANEL_GAP
    width, height = x - PANEL_GAP + 16, TOP + PLOT + BOTTOM
    ticks = round((high - low) / STEP)
    for i in range(ticks + 1):
        value = low + i * STEP
        y = _y(value, low, high)
        parts.insert(
            0,
            f'<line x1="{LEFT}" x2="{width - 16:.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d0d7de" stroke-width="1"/>',
        )
        parts.append(_text(LEFT - 8, y + 4, f"{value:.1f}x", anchor="end", size=11))
    title = "Speedup of the time per output token: patched host over the same host unpatched"
    parts.append(_text(16, 24, title, size=15, weight="600", anchor="start"))
    x = 16.0
    for host, color in zip(hosts, COLORS, strict=False):
        parts.append(f'<rect x="{x:.0f}" y="35" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 17, 45, host, anchor="start", size=12))
        x += 17 + 9 * len(host) + 16
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    frame = f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", frame, *parts, "</svg>", ""])


def _panel(
    model: str, found: Sequence[LaneAndBase], hosts: Sequence[str], x: float, low: float, high: float
) -> tuple[list[str], float]:
    """Return a model's bars from `x` on, and their width."""
    loads = list(dict.fromkeys(p.requests for p in sorted(found, key=lambda p: p.lane.level.order)))
    mine = [h for h in hosts if any(p.host == h for p in found)]
    group = len(mine) * (BAR + GAP) - GAP
    width = max(len(loads) * (group + GROUP_GAP) - GROUP_GAP, CHARACTER * len(model))
    bars, middle, base = [], x + width / 2, _y(1.0, low, high)
    x = middle - (len(loads) * (group + GROUP_GAP) - GROUP_GAP) / 2
    for load in loads:
        for i, host in enumerate(mine):
            pair = next((p for p in found if (p.host, p.requests) == (host, load)), None)
            if pair is None:
                continue
            value, left = _ratio(pair), x + i * (BAR + GAP)
            y = _y(value, low, high)
            top, tall = min(y, base), abs(y - base)
            color = COLORS[hosts.index(host) % len(COLORS)]
            bars.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{BAR}" height="{tall:.1f}" fill="{color}">'
                f"<title>{escape(f'{model}, {host}, {load} requests at a time: {value:.3f}x')}</title></rect>"
            )
            bars.append(_text(left + BAR / 2, top - 4, f"{value:.2f}", size=10))
        bars.append(_text(x + group / 2, TOP + PLOT + 16, load, size=11))
        x += group + GROUP_GAP
    bars.append(_text(middle, TOP - 8, model, size=12, weight="600"))
    bars.append(_text(middle, TOP + PLOT + 34, "concurrent requests", size=11))
    return bars, width


def _ratio(pair: LaneAndBase) -> float:
    found = pair.ratio(TPOT)
    assert found is not None  # such pairs are left out
    return found[0]


def _y(value: float, low: float, high: float) -> float:
    return TOP + PLOT * (high - value) / (high - low)


def _text(x: float, y: float, text: str, size: int = 11, anchor: str = "middle", weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {TEXT} {style}>{escape(text)}</text>'
