"""`fk-bench trace`: FlashInfer-Trace data sets, written and read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fk_bench.capture.captures import CaptureError
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable
from fk_bench.evaluate.adapters.sets import SetError, read_set
from fk_bench.trace import reading, verdicts, writing
from fk_bench.trace.schema import PACKAGE, TraceError, checked_by_theirs
from fk_bench.trace.workloads import CAPTURED, LIMIT, MODEL

SHOWN = 12  # reasons of the table


def trace_command(
    what: Annotated[list[str], typer.Argument(help="export FOLDER, or import FOLDER")],
    ops: Annotated[str, typer.Option(help="with export: these ops, with commas (default: all)")] = "",
    cases: Annotated[
        str, typer.Option(help=f"with export: {MODEL} (declared for models), {CAPTURED}, or both")
    ] = f"{MODEL},{CAPTURED}",
    captures: Annotated[
        Path | None, typer.Option(help="with export: folder of captures (default: those that ship)")
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option(help="with export: folder of candidates, which become Solutions")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="with export: a run of `fk-bench kernels`, whose verdicts become Traces"),
    ] = None,
    limit: Annotated[
        float, typer.Option(help="with export: MiB of one stored tensor; cases that need more are left out")
    ] = LIMIT / 2**20,
    out: Annotated[Path, typer.Option(help="with import: a new folder")] = Path("imported"),
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Write ops, cases, candidates and verdicts as a FlashInfer-Trace data set, or read a data set of others.

    An import makes captures/ and candidates/, for `fk-bench kernels --cases captured --captures` and `--candidate`,
    and rows.jsonl. If flashinfer-bench is installed, its models check the data set.
    """
    verb, rest = what[0], what[1:]
    if verb not in ("export", "import") or len(rest) != 1:
        fail(f"trace {' '.join(what)}: give `export FOLDER` or `import FOLDER`")
    folder = Path(rest[0]).expanduser()
    try:
        if verb == "export":
            result = _export(folder, ops, cases, captures, candidates, run, int(limit * 2**20), json)
        else:
            result = _import(folder, out, json)
    except (TraceError, CaptureError, SetError, registry.UnknownName) as error:
        fail(str(error))
    last_line({"command": "trace", "verb": verb, "ok": True, **result})


def _export(
    folder: Path, ops: str, cases: str, captures: Path | None, candidates: Path | None, run: Path | None, limit: int,
    quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    sources = tuple(filter(None, map(str.strip, cases.split(","))))
    if unknown := sorted(set(sources) - {MODEL, CAPTURED}):
        raise TraceError(f"--cases {unknown[0]}: the sources are {MODEL} and {CAPTURED}")
    names = list(filter(None, map(str.strip, ops.split(",")))) or registry.op_names()
    registry.check_names(names)
    if run is not None and candidates is None:
        kept = (run if run.is_dir() else run.parent) / "candidates"
        candidates = kept if kept.is_dir() else None
    chosen = read_set(_name(candidates), candidates) if candidates is not None else None
    rows = verdicts.read_run(run) if run is not None else ()

    def tell(op: str, count: int) -> None:
        print(f"{op}: {count} workloads", file=sys.stderr, flush=True)

    made = writing.write(folder, names, sources, captures, chosen, rows, limit, tell)
    version = checked_by_theirs(folder)
    absent = sorted(set(names) - {e.op for e in made.entries.values()})
    counts = {
        "definitions": len(made.definitions), "workloads": len(made.entries),
        "solutions": len(made.solutions), "traces": made.traces,
    }  # fmt: skip
    left_out = {op: dict(reasons) for op, reasons in made.left_out.items()}
    if not quiet:
        table(f"Data set {folder}", list(counts), [list(counts.values())])
        _show_left_out([(op, reason, n) for op, reasons in left_out.items() for reason, n in reasons.items()])
        _show_check(version)
    return {
        "folder": str(folder),
        **counts,
        "ops_left_out": absent,
        "left_out": left_out,
        "checked_by": version,
    }


def _name(folder: Path | None) -> str:
    """The name of a set: that of its folder, or for the copies in a run that of the run."""
    assert folder is not None
    place = folder.resolve()
    return reading.slug(place.parent.name if place.name == "candidates" else place.name)


def _import(folder: Path, out: Path, quiet: bool) -> dict[str, Any]:
    found = reading.read(folder, out)
    version, refused = None, ""
    try:
        version = checked_by_theirs(folder)
    except TraceError as problem:  # what could be read is imported all the same
        refused = str(problem)
    if not quiet:
        rows = [
            [op, n, ", ".join(s for s, of in found.candidates.items() if op in of)] for op, n in _by_op(found)
        ]
        table(f"Imported into {out}", ("op", "cases", "sets with a candidate"), rows)
        _show_left_out([("", reason, n) for reason, n in found.left_out.items()])
        _show_check(version, refused)
    return {
        "folder": str(folder), "out": str(out), "cases": dict(found.cases), "candidates": found.candidates,
        "rows": found.rows, "left_out": dict(found.left_out), "checked_by": version,
        "refused": refused,
    }  # fmt: skip


def _by_op(found: reading.Found) -> Sequence[tuple[str, int]]:
    ops = {*found.cases, *(op for of in found.candidates.values() for op in of)}
    return [(op, found.cases.get(op, 0)) for op in sorted(ops)]


def _show_left_out(reasons: Sequence[tuple[str, str, int]]) -> None:
    if not reasons:
        return
    shown = [[op, n, printable(reason)] for op, reason, n in reasons[:SHOWN]]
    if len(reasons) > SHOWN:
        shown.append(["", "", f"and {len(reasons) - SHOWN} more reasons, in the line of JSON"])
    table("Left out", ("op", "number", "why"), shown)


def _show_check(version: str | None, refused: str = "") -> None:
    where = (
        f"{PACKAGE} {version} accepts it" if version else f"not checked by {PACKAGE}, which is not installed"
    )
    if refused:
        where = printable(refused)
    print(f"The data set: {where}\n")
