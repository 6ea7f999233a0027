"""`fk-bench coverage`: audit every modeling file of the installed transformers."""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.coverage.audit import Row, summary
from fk_bench.coverage.run import run

PAPER = Path(__file__).parent / "data" / "paper_list.txt"
PAPER_COMMIT = "da6c53e4"  # of transformers


def paper_files() -> list[str]:
    """The 425 modeling files of the paper's table."""
    return [file_of(name) for name in PAPER.read_text().split()]


def file_of(name: str) -> str:
    """The modeling file that a recorded name stands for."""
    return name if "/" in name else f"{name}/modeling_{name}.py"


def coverage_command(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="only this architecture: its folder, file or model type; may repeat"),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="only the 425 files of the paper's list")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only one line of JSON")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; 1 GB of memory each")] = None,
) -> None:
    """Audit each modeling file of the installed transformers: its modules, matched with ops, and a verdict.

    Strict counts architectures of which every module is matched by class, signature and probe; loose those of which
    every module is matched by class. docs/coverage.md defines the verdicts.
    """
    try:
        import transformers
        from fk_integrations.transformers import architectures
    except ImportError:
        fail("transformers is not installed here: `pip install transformers`, then run this again")
    known = architectures.files()
    files = _chosen(arch, known) if arch else [f for f in paper_files() if f in known] if paper else known
    start = time.monotonic()
    rows = run(files, workers or min(os.cpu_count() or 1, 8), _quiet if as_json else _show(len(files)))
    data = {
        "ok": True,
        "transformers": transformers.__version__,
        "seconds": round(time.monotonic() - start, 1),
        **summary(rows),
        "rows": [row.to_dict() for row in rows],
    }
    listed = set(paper_files())
    if not arch:
        data["paper"] = {
            "commit": PAPER_COMMIT,
            "listed": len(listed),
            **summary([r for r in rows if r.file in listed]),
        }
    if not as_json:
        _tables(rows, data)
    last_line(data if as_json or arch else {k: v for k, v in data.items() if k != "rows"})


def _chosen(names: list[str], known: list[str]) -> list[str]:
    """The files that the names mean. Ends the command for an unknown name."""
    found: list[str] = []
    for name in names:
        same = [
            file
            for file in known
            if name in (file, file.partition("/")[0], Path(file).stem.removeprefix("modeling_"))
        ]
        same = same or [f for f in known if f.partition("/")[0] == name.replace("-", "_")]
        if not same:
            folders = sorted({file.partition("/")[0] for file in known})
            close = difflib.get_close_matches(name, folders, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            fail(f"no modeling file of transformers is called {name!r}{hint}")
        found += same
    return list(dict.fromkeys(found))


def _quiet(row: Row) -> None:
    """Show nothing."""


def _show(total: int) -> Any:
    """A callback that shows progress on standard error."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    task = progress.add_task("audit", total=total)
    progress.start()

    def done(row: Row) -> None:
        progress.update(task, advance=1, description=row.file.partition("/")[0])
        if progress.finished:
            progress.stop()

    return done


def _tables(rows: list[Row], data: dict[str, Any]) -> None:
    if len(rows) <= 60:
        table(
            "Architectures",
            ("file", "model", "verdict", "ops", "no op", "matched by class only"),
            [
                (r.file, r.model, r.verdict.value, r.ops, _named(r.missing) or r.error, _named(r.differs))
                for r in rows
            ],
        )
    table("Verdicts", ("verdict", "architectures"), list(data["verdicts"].items()))
    for title, key in (("Missing primitives", "missing"), ("Matched by class only", "differs")):
        shown = [(x["name"], x["architectures"], x["nothing_else"]) for x in data[key][:15]]
        if shown:
            table(title, ("what", "architectures that need it", "of these, need nothing else"), shown)
    counted = [("installed", data)] + ([("paper's list", data["paper"])] if "paper" in data else [])
    table(
        f"Coverage of transformers {data['transformers']}",
        ("architectures", "number", "strict", "%", "loose", "%"),
        [
            (name, d["architectures"], d["strict"]["count"], d["strict"]["percent"], d["loose"]["count"],
             d["loose"]["percent"])
            for name, d in counted
        ],
    )  # fmt: skip


def _named(found: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {', '.join(classes[:3])}" for name, classes in found.items()]
