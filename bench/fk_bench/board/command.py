"""`fk-bench board` writes the site of some runs; `fk-bench submit-check` says what it would refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fk_bench.board import site, standings, submission
from fk_bench.board.submission import SubmissionError
from fk_bench.core.scores import FAILED, NOT_RUN
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable


def board_command(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs or submissions, or files .jsonl or .jsonl.xz")
    ],
    out: Annotated[Path, typer.Option(help="folder of the site, created if missing")] = Path("site"),
    everything: Annotated[
        bool, typer.Option("--all", help="also rank submissions that submit-check refuses; they are marked")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Write a static board from rows: rankings, heat map, curves, and a page for each set. It needs no server.

    Rows are those of `fk-bench eval`, `fk-bench kernels` and `fk-bench agent-loop`. A folder with submission.toml
    is a submission: its author, agent, cost and sources are shown. One that submit-check refuses is left out.
    """
    try:
        given, left_out = submission.read_all(runs, everything)
    except SubmissionError as error:
        fail(str(error))
    found = standings.standings(standings.entries_of(given))
    if not found:
        fail(
            "no set in these rows: the board shows rows of `fk-bench eval`, and of `fk-bench kernels` or `agent-loop`"
            " with candidates"
        )
    warnings = list(dict.fromkeys([*left_out, *(w for one in given for w in one.warnings)]))
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    index = site.write(out, found, warnings)
    if not json:
        for one in found:
            ranked = (
                [*(name for _, name in site.RANKED)] if one.declared else ["speedup of right cases", "right"]
            )
            columns = ["", "set", "agent", *ranked, "cases"]
            lines = [
                [
                    _rank(n, one.ranges.get(e.name)),
                    e.name + " (refused)" * bool(e.refused),
                    e.agent,
                    *_figures(e, bool(one.declared)),
                    len(e.cases),
                ]
                for n, e in enumerate(one.entries, 1)
            ]
            table(f"{one.league.title} ({one.league.digest or 'no suite'})", columns, lines)
    last_line({
        "command": "board", "ok": True, "leagues": len(found), "sets": sum(len(s.entries) for s in found),
        "index": str(index), "warnings": warnings,
    })  # fmt: skip


def _rank(place: int, possible: tuple[int, int] | None) -> str:
    """The rank of a set; behind it the ranks that its times allow, if they are several."""
    if possible is None or possible[0] == possible[1]:
        return str(place)
    return f"{place} ({possible[0]}-{possible[1]})"


def _figures(entry: standings.Entry, scored: bool) -> list[str]:
    """The columns of a set in the table: its score with its parts, or what its kernels alone do."""
    if scored:
        return [f"{standings.rank_value(entry, key):.3f}" for key, _ in site.RANKED]
    speedup = standings.kernel_speedup(entry)
    ran = [r for r in entry.cases if r.status not in NOT_RUN]
    right = sum(r.status not in FAILED for r in ran) / len(ran) if ran else None
    return ["-" if speedup is None else f"{speedup:.3f}", "-" if right is None else f"{right:.0%}"]


def submit_check_command(
    folder: Annotated[Path, typer.Argument(help="a folder with submission.toml, candidates/ and rows")],
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Say what a board would refuse of a submission; nothing of it is imported. The exit status is 1 if anything."""
    why = [printable(text, 500) for text in submission.refusals(folder)]
    if not json:
        for text in why:
            print(f"refused: {text}")
        if not why:
            print(f"{folder}: nothing is refused")
    last_line({"command": "submit-check", "ok": not why, "refused": why})
    if why:
        raise SystemExit(1)
