"""The parts that all HTML reports share: the templates' environment, the name of a model, the layout of figures.

A page is one self-contained file that loads nothing: style and scripts are in templates/base.html, plotly.js is inline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath
from typing import Any

from fk_bench.core.rows import Row

# Okabe and Ito: distinguishable for colour-blind readers, and visible on a white and on a dark page.
BLUE, ORANGE, GREEN, YELLOW, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999"
_HUB = re.compile(
    r"models--(.+?)--(.+)"
)  # a folder of the hub's cache: models--ORGANIZATION--NAME/snapshots/COMMIT


@dataclass(frozen=True)
class Figure:
    """A figure as a fragment of HTML. Its title is text of the page, so that a toolbar never covers it."""

    id: str
    title: str
    html: str


def render(template: str, **values: Any) -> str:
    """A page from a template of core/templates. All text is escaped; an undefined name raises."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fk_bench.core"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)


def model_name(model: str | None) -> str:
    """The name of a model for a title: a name of the hub unchanged, the last folder of a path."""
    if not model:
        return "unnamed model"
    parts = PurePath(model).parts
    for part in parts:
        if found := _HUB.fullmatch(part):
            return f"{found[1]}/{found[2]}"
    local = PurePath(model).is_absolute() or parts[0] in (".", "..", "~") or len(parts) > 2
    return parts[-1] if local else model


def period(found: Sequence[Row]) -> str:
    """'2026-11-22 19:06 to 19:11 UTC': the time from the first row to the last."""
    first, last = (datetime.fromisoformat(r.time).astimezone(timezone.utc) for r in (found[0], found[-1]))
    end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M} to {end} UTC"


def layout(figure: Any, x: str, y: str) -> Any:
    """The layout of all figures: no title inside, space for the toolbar above, colours by the page's style."""
    figure.update_layout(
        template="plotly_white", height=380, margin={"l": 64, "r": 16, "t": 34, "b": 50}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", legend={"orientation": "h", "y": -0.22},
        font={"family": "system-ui, sans-serif", "size": 13},
    )  # fmt: skip
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def fragments(figures: Sequence[tuple[str, str, Any]]) -> list[Figure]:
    """(id, title, plotly figure) as fragments, without empty figures. The first one contains plotly.js."""
    made: list[Figure] = []
    for name, title, figure in figures:
        if not figure.data:
            continue
        html = figure.to_html(
            full_html=False, include_plotlyjs=not made, include_mathjax=False, div_id=f"plot-{name}",
            default_width="100%", default_height=f"{figure.layout.height or 380}px",
            config={"displaylogo": False, "responsive": True,
                    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]},
        )  # fmt: skip
        made.append(Figure(name, title, html))
    return made
