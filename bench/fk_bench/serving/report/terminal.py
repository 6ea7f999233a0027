"""The results of a run in the terminal: a table of lanes by load, then the verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fk_bench.core.rows import Row
from fk_bench.serving import summary
from fk_bench.serving.report import numbers, requests, verdict
from fk_bench.serving.report.verdict import LaneOutcome, LaneSpeedup

if TYPE_CHECKING:
    from rich.console import Console

# (heading, metric, digits); each has a speedup next to it
COLUMNS = (
    ("max in flight", "max_concurrency_within_slo", 0), ("max req/s", "max_rate_within_slo", 2),
    ("output tok/s", "output_tokens_per_s", 1), ("TTFT p50 ms", "ttft_ms_p50", 1), ("TPOT p50 ms", "tpot_ms_p50", 2),
    ("E2EL p50 ms", "e2el_ms_p50", 1),
)  # fmt: skip
STYLE = {
    LaneOutcome.FASTER: "green",
    LaneOutcome.SLOWER: "red",
    LaneOutcome.SAME: "dim",
    LaneOutcome.ONE_ROUND: "dim",
}


def show(found: Sequence[Row], console: Console | None = None) -> None:
    """Print the table and the verdict; colours only on a terminal."""
    from rich.console import Console

    screen = console or Console(width=None if sys.stdout.isatty() else 160)
    screen.print(_table(found))
    names = summary.names(found)
    results, bases = summary.lanes(found, names), numbers.baselines(found, names)
    screen.print()
    if not found[0].machine.gpus:
        screen.print("Measured on a CPU: these speeds say nothing about a GPU.", style="yellow")
    checked = summary.checked(results)
    lines = verdict.lines(results, bases, requests.measured_rounds(found), agreement=not checked)
    for line in [*checked, *lines]:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(found: Sequence[Row]) -> Any:
    from rich.table import Table

    names = summary.names(found)
    results, bases = summary.lanes(found, names), numbers.baselines(found, names)
    known = {r.lane: r for r in results}
    outcomes = {(o.lane, o.level): o for o in requests.outcomes(found)}
    columns = [c for c in COLUMNS if any(c[1] in cell.mean for r in results for cell in r.cells)]
    table = Table(title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("load", "lane"):
        table.add_column(heading, overflow="fold")
    compared = any(base != lane for lane, base in bases.items())
    for heading, *_ in columns:
        table.add_column(heading, justify="right")
        if compared:
            table.add_column("speedup", justify="right")
    table.add_column("requests", justify="right")
    levels = list(dict.fromkeys(o.level for o in outcomes.values()))
    for level in levels:
        for at, result in enumerate(r for r in results if (r.lane, level) in outcomes):
            cell = numbers.cell_at(result, level)
            base = (
                None if numbers.own_kernels(result) else numbers.cell_at(known.get(bases[result.lane]), level)
            )
            cells: list[Any] = ["" if at else level.label, result.lane]
            for _, metric, digits in columns:
                value = numbers.mean(cell, metric)
                cells.append("" if value is None else f"{value:.{digits}f}")
                if compared:
                    cells.append(_speedup(verdict.speedup(cell, base, metric)))
            one = outcomes[result.lane, level]
            cells.append(f"{one.completed}" + (f", {one.failed} failed" if one.failed else ""))
            table.add_row(*cells)
        table.add_section()
    return table


def _speedup(one: LaneSpeedup | None) -> Any:
    from rich.text import Text

    return Text("") if one is None else Text(verdict.times(one.ratio), style=STYLE[one.outcome])
