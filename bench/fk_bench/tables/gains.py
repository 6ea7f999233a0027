"""The README's table and figure: what a patch gains over many models, at each number of requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fk_bench.core.model_names import hub_name
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e.gains import Gain, gains
from fk_bench.e2e.loads import Kind, Load
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, machine

COMMAND = "patch-compare"
HOSTS = {"vllm": "vLLM", "sglang": "SGLang"}
COLUMN, LEFT, TOP, PLOT, BOTTOM = (
    92,
    48,
    62,
    220,
    50,
)  # of the figure: width of a column, margins, height of the plot
DOT, COLOR, MIDDLE = 4.5, "#3b6fb6", "#e08a3c"
STEP = 0.1  # between grid lines
TEXT = 'font-family="system-ui, sans-serif" fill="#24292f"'


@dataclass(frozen=True)
class Dot:
    """The geometric mean of the ratios of a model on a chip, over its loads of one kind."""

    model: str
    chip: str
    loads: tuple[str, ...]
    ratio: float


def table(files: Files) -> Iterator[Table]:
    """Least, median and greatest ratio over models, for each host and number of requests, and for prompts."""
    groups = _groups(files)
    cells = []
    for (host, work), found in groups.items():
        ratios = sorted(dot.ratio for dot in found)
        models = {dot.model for dot in found}
        low, high = (hub_name(min(found, key=lambda dot: sign * dot.ratio).model) for sign in (1, -1))
        cells.append([
            host, work, str(len(models)), f"{ratios[0]:.2f} ({low})", f"**{statistics.median(ratios):.2f}**",
            f"{ratios[-1]:.2f} ({high})",
        ])  # fmt: skip
    if cells:
        used = [row for row in flat(files) if row.command == COMMAND]
        title = f"Patched host over the same host, random weights in the shapes of public models ({machine(used)}):"
        yield title, ["host", "work", "models", "least", "median", "greatest"], cells


def figure(files: Files) -> str:
    """The same as an SVG: a dot for each model and chip, a line at the median. Raises ConfigError without such rows."""
    groups = _groups(files)
    if not groups:
        raise ConfigError(f"{', '.join(files)}: no rows of {COMMAND}")
    every = [dot.ratio for found in groups.values() for dot in found]
    low, high = math.floor(min(every) / STEP) * STEP, math.ceil(max(every) / STEP) * STEP

    def y(value: float) -> float:
        return TOP + PLOT * (high - value) / (high - low)

    width, height = LEFT + COLUMN * len(groups) + 16, TOP + PLOT + BOTTOM
    title = "Speedup of a patched host over the same host: one dot per model and chip, bar: median"
    parts = [_text(16, 24, title, 15, "start", "600")]
    for i in range(round((high - low) / STEP) + 1):
        value = low + i * STEP
        color = "#57606a" if abs(value - 1) < STEP / 2 else "#d0d7de"
        parts.append(
            f'<line x1="{LEFT}" x2="{width - 16}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{color}"/>'
        )
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.1f}x", 11, "end"))
    for i, ((host, work), found) in enumerate(groups.items()):
        middle = LEFT + COLUMN * (i + 0.5)
        for j, dot in enumerate(sorted(found, key=lambda dot: dot.ratio)):
            x = middle + (j % 5 - 2) * 8  # next to each other, so that equal ones stay visible
            name = f"{hub_name(dot.model)}, {dot.chip}, {host}, {', '.join(dot.loads)}: {dot.ratio:.3f}x"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y(dot.ratio):.1f}" r="{DOT}" fill="{COLOR}" fill-opacity="0.6">'
                f"<title>{escape(name)}</title></circle>"
            )
        median = statistics.median(dot.ratio for dot in found)
        parts.append(
            f'<line x1="{middle - 30:.1f}" x2="{middle + 30:.1f}" y1="{y(median):.1f}" y2="{y(median):.1f}"'
            f' stroke="{MIDDLE}" stroke-width="3"/>'
        )
        parts.append(_text(middle, TOP - 8, f"{median:.2f}x", 12, "middle", "600"))
        parts.append(_text(middle, TOP + PLOT + 18, work, 11))
        parts.append(_text(middle, TOP + PLOT + 34, host, 11))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img">'
    )
    frame = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", frame, *parts, "</svg>", ""])


def _groups(files: Files) -> dict[tuple[str, str], list[Dot]]:
    """{(host, work): dots}, vLLM first, decoding before prompts."""
    groups: dict[tuple[int, int, int, str, str], dict[tuple[str, str], list[Gain]]] = {}
    for gain in gains(flat(files)):
        requests = Load.parse(gain.load).requests if gain.kind is Kind.DECODE else 0
        work = f"{requests} request{'s' if requests > 1 else ''}" if requests else gain.kind.value
        order = list(HOSTS).index(gain.host) if gain.host in HOSTS else len(HOSTS)
        key = order, list(Kind).index(gain.kind), requests, HOSTS.get(gain.host, gain.host), work
        groups.setdefault(key, {}).setdefault((gain.model, gain.chip), []).append(gain)
    return {
        (host, work): [_dot(of, found) for of, found in models.items()]
        for (_, _, _, host, work), models in sorted(groups.items())
    }


def _dot(of: tuple[str, str], found: list[Gain]) -> Dot:
    mean = math.exp(statistics.fmean(math.log(gain.ratio) for gain in found))
    return Dot(*of, tuple(gain.load for gain in found), mean)


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {TEXT} {style}>{escape(text)}</text>'
