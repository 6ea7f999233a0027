"""`fk-bench agents-table`: kernels of agents by level, mode and kind of baseline, from rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fk_bench.board import standings, submission
from fk_bench.board.standings import Entry, fast_p, speed
from fk_bench.board.submission import SubmissionError
from fk_bench.core.rows import Row
from fk_bench.core.scores import FAILED, NOT_RUN
from fk_bench.core.stats import geometric_mean
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable

COLUMNS = (
    "set",
    "agent",
    "mode",
    "chip",
    "level",
    "baseline",
    "cases",
    "right",
    "timed",
    "speedup",
    "fast_1",
    "fast_2",
)
EAGER, COMPILED, VENDOR, NONE = "eager", "compiled", "vendor or hand-written", "none"


@dataclass(frozen=True)
class Line:
    """One line of the table. right, fast_1, fast_2: shares of the cases; speedup: of right cases with a time."""

    name: str
    agent: str
    mode: str
    chip: str
    level: int
    baseline: str
    cases: int
    right: float
    timed: int
    speedup: float | None
    fast_1: float | None
    fast_2: float | None


def kind_of(row: Row) -> str:
    """The kind of a case's baseline, by its name in the row."""
    name = row.baseline or ""
    if not name:
        return NONE
    if name.startswith("inductor"):
        return COMPILED
    return EAGER if name.startswith(("reference", "torch")) else VENDOR


def lines_of(entries: Iterable[Entry]) -> list[Line]:
    """The lines of all sets, by set, level and kind of baseline. Provisional times are left out."""
    found = []
    for entry in entries:
        ran = [r for r in entry.cases if r.status not in NOT_RUN]
        groups: dict[tuple[int, str], list[Row]] = {}
        for row in ran:
            groups.setdefault((int(row.case.get("level", 0)), kind_of(row)), []).append(row)
        found += [_line(entry, level, kind, groups[level, kind]) for level, kind in sorted(groups)]
    return found


def _line(entry: Entry, level: int, kind: str, mine: Sequence[Row]) -> Line:
    speeds = [s for r in mine if (s := speed(r)) is not None]
    timed = [s for s in speeds if s > 0]
    return Line(
        printable(entry.name), printable(entry.agent), entry.mode, entry.league.chip, level, kind, len(mine),
        sum(r.status not in FAILED for r in mine) / len(mine), len(timed), geometric_mean(timed)[0] if timed else None,
        fast_p(speeds, 1.0) if speeds else None, fast_p(speeds, 2.0) if speeds else None,
    )  # fmt: skip


def _cells(line: Line) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    return [
        line.name, line.agent, line.mode, line.chip, str(line.level), line.baseline, str(line.cases), share(line.right),
        str(line.timed), "" if line.speedup is None else f"{line.speedup:.3f}", share(line.fast_1), share(line.fast_2),
    ]  # fmt: skip


def agents_table_command(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs or submissions, or files .jsonl or .jsonl.xz")
    ],
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Compare kernels of agents and libraries by level, mode and kind of baseline, from rows of the judge.

    Speedups are geometric means of right cases; fast_1 and fast_2 count failed cases. An agent's cases are those of the
    best attempts of its tasks; tasks without one are named below the table. A refused submission is left out.
    """
    try:
        given, left_out = submission.read_all(runs)
    except SubmissionError as error:
        fail(str(error))
    for warning in left_out:
        print(f"warning: {printable(warning, 500)}", file=sys.stderr)
    entries = standings.entries_of(given)
    found, without = lines_of(entries), [said for e in entries if (said := e.without_kernels)]
    if not found and not without:
        fail("no case of a kernel in these rows: give runs of `fk-bench kernels` or `fk-bench agent-loop`")
    if not json:
        if found:
            table("Kernels by level and baseline", COLUMNS, [_cells(line) for line in found])
        for sentence in without:
            print(sentence)
    last_line({
        "command": "agents-table", "ok": True, "lines": [vars(line) for line in found], "without_kernels": without,
    })  # fmt: skip
