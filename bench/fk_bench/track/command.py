"""`fk-bench track`: log runs into MLflow, and read candidates with their lineage."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable
from fk_bench.track.store import EVAL, Store, Tracked, TrackError

COLUMNS = ("op", "digest", "parent", "stage", "status", "speedup", "chip", "level", "agent", "run")
VERBS = {"show": "[OP]", "best": "OP", "diff": "DIGEST DIGEST"}


def track_command(
    what: Annotated[
        list[str],
        typer.Argument(help="folders of runs to log; or: show [OP], best OP, diff DIGEST DIGEST"),
    ],
    uri: Annotated[
        str,
        typer.Option(
            help="tracking URI of MLflow (default: MLFLOW_TRACKING_URI, or a folder of fk-bench-runs)"
        ),
    ] = "",
    chip: Annotated[
        str, typer.Option(help="only candidates measured on a chip with this in its name, such as H200")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Log runs of `kernels`, `eval` and `agent-loop` into MLflow; show candidates, their scores and their parents.

    A candidate is known by the digest of its source: the first characters suffice.
    """
    verb, rest = what[0], what[1:]
    try:
        if verb not in VERBS:
            result = _log(Store(uri), what)
        else:
            count = {"show": (0, 1), "best": (1, 1), "diff": (2, 2)}[verb]
            if not count[0] <= len(rest) <= count[1]:
                fail(f"track {verb} takes {VERBS[verb]}")
            store = Store(uri)
            verbs = {"show": _show, "best": _best, "diff": _diff}
            result = verbs[verb](store, rest, chip, json)
        last_line(
            {
                "command": "track",
                "ok": True,
                "uri": store.uri if verb in VERBS else result.pop("uri"),
                **result,
            }
        )
    except TrackError as error:
        fail(str(error))


def _log(store: Store, folders: Sequence[str]) -> dict[str, Any]:
    for folder in folders:
        if not Path(folder).exists():
            fail(f"there is no run {folder}; the verbs are {', '.join(VERBS)}")
    return {"uri": store.uri, "logged": {f: store.log(Path(f)) for f in folders}}


def _cells(one: Tracked) -> list[str]:
    speedup = one.speedup
    marked = " (provisional)" if one.provisional else ""
    return [
        one.op, one.digest, one.parent, one.stage, one.status, "" if speedup is None else f"{speedup:.3f}{marked}",
        printable(one.chip), one.tags.get("fk.level", ""), printable(one.tags.get("fk.agent", "")),
        one.tags.get("fk.run", ""),
    ]  # fmt: skip


def _data(one: Tracked) -> dict[str, Any]:
    return {"op": one.op, "digest": one.digest, "parent": one.parent, "stage": one.stage, "status": one.status,
            "chip": one.chip, "speedup": one.speedup, "provisional": one.provisional,
            "metrics": dict(one.metrics)}  # fmt: skip


def _on(chip: str, found: Sequence[Tracked]) -> list[Tracked]:
    """The candidates of this chip, or of those with this in their names."""
    return [c for c in found if c.chip == chip] or [c for c in found if chip.lower() in c.chip.lower()]


def _show(store: Store, rest: Sequence[str], chip: str, quiet: bool) -> dict[str, Any]:
    found = _on(chip, store.candidates(rest[0] if rest else ""))
    if not quiet:
        table(f"Candidates in {store.uri}", COLUMNS, [_cells(c) for c in found])
    return {"candidates": [_data(c) for c in found]}


def _best(store: Store, rest: Sequence[str], chip: str, quiet: bool) -> dict[str, Any]:
    """The fastest right candidate of one chip, final scores before others, its line of parents, and its scores at each
    level of an evaluation."""
    found = _on(chip, store.candidates(rest[0]))
    timed = [c for c in found if c.speedup is not None and c.stage != "stub"]
    if not timed:
        fail(
            f"no right candidate of {rest[0]} with a speedup is tracked, stubs aside; `fk-bench track show` lists all"
        )
    if len(chips := sorted({c.chip for c in timed})) > 1:
        fail(
            f"candidates of {rest[0]} were measured on several chips, whose speedups do not compare: give --chip with"
            f" one of {', '.join(chips)}"
        )
    final = [c for c in timed if c.stage != "attempt"] or timed
    best = max(final, key=lambda c: c.speedup or 0.0)
    line, by_digest = [best], {c.digest: c for c in found if c.stage in ("attempt", "stub")}
    of_attempt = best.stage in ("final", EVAL)
    parent = by_digest.get(best.digest if of_attempt else best.parent)
    while parent is not None and parent not in line:
        line.append(parent)
        parent = by_digest.get(parent.parent)
    levels = {k: v for c in found if c.digest == best.digest for k, v in c.levels.items()}
    if not quiet:
        table(f"Best candidate of {rest[0]}, and its parents", COLUMNS, [_cells(c) for c in line])
        if levels:
            cells = [[printable(name), f"{value:.3f}"] for name, value in levels.items()]
            table("Its speedups in evaluations", ("where", "speedup"), cells)
        print(store.source(best))
    return {"best": _data(best), "lineage": [c.digest for c in line], "levels": levels}


def _diff(store: Store, rest: Sequence[str], chip: str, quiet: bool) -> dict[str, Any]:
    sides = [_one(store, digest, chip) for digest in rest]
    before, after = (store.source(c).splitlines() for c in sides)
    changed = list(difflib.unified_diff(before, after, sides[0].digest, sides[1].digest, lineterm=""))
    names = sorted({*sides[0].metrics} | {*sides[1].metrics})
    if not quiet:
        lines = [[n, *(f"{c.metrics[n]:.4g}" if n in c.metrics else "" for c in sides)] for n in names]
        table("Metrics", ("", *(c.digest for c in sides)), lines)
        print(printable("\n".join(changed), 1 << 20, lines=True))
    return {"sides": [_data(c) for c in sides], "changed_lines": len(changed)}


def _one(store: Store, digest: str, chip: str) -> Tracked:
    """The last tracked state of a candidate: its final score rather than an attempt."""
    found = _on(chip, store.candidates(digest=digest))
    if len({c.digest for c in found}) != 1:
        there = ", ".join(sorted({c.digest for c in found})) or "none"
        fail(f"{digest!r} is the beginning of no single digest: {there}; `fk-bench track show` lists all")
    own = [c for c in found if c.stage != EVAL]
    return (own or found)[-1]
