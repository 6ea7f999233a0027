"""`fk-bench tables`: write the tables of README.md and of pages under docs/, and the README's figure.

A document contains `<!-- table: NAME [FILE ...] -->`, the table, and `<!-- end -->`. The command replaces the text in
between; --check fails if it differs from the rows. A FILE is a row file of bench/results without '.jsonl.xz' and, where
it is the newest, without date and chip ('servers-vllm' for '2026-11-22-h200-servers-vllm'), or a group of
bench/results/tables.json. Without FILE the table is made of its default group.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fk_bench.core.terminal.flags import ConfigError
from fk_bench.core.terminal.output import fail, last_line
from fk_bench.e2e.gains import GROUP
from fk_bench.explain.tables import Table
from fk_bench.tables import (
    architectures,
    figure,
    gains,
    layers,
    measured,
    model_plot,
    patch,
    servers,
    speeds,
    steps,
)
from fk_bench.tables.kernels import kernels
from fk_bench.tables.origin import Files
from fk_bench.tables.results import GROUPS, Results, take

Maker = Callable[[Files], Iterator[Table]]
# {name of a table: (function, default group)}
TABLES: dict[str, tuple[Maker, str]] = {
    "summary": (servers.summary_table, "summary"),
    "gains": (gains.table, GROUP),
    "hosts": (servers.hosts, "hosts"),
    "tails": (servers.tails, "hosts"),
    "loads": (servers.loads, "hosts"),
    "engine": (servers.engine, "engine"),
    "kernels": (kernels, "kernels"),
    "steps": (steps.steps, "steps"),
    "realized": (steps.realized, "steps"),
    "linear": (layers.linear, "linear"),
    "attention": (layers.attention, "attention"),
    "models": (patch.models, "models"),
    "throughput": (patch.throughput, "models"),
    "engines": (patch.engines, "engines"),
    "prompts": (patch.prompts, "models"),
    "contexts": (patch.contexts, "models"),
    "mixed": (patch.mixed, "models"),
    "undone": (patch.undone, "models"),
    "text-models": (speeds.text, "engines"),
    "patched-models": (speeds.patched, GROUP),
    "formats": (speeds.formats, "engines"),
    "measured": (measured.table, GROUP),
    # Not part of `make bench-h200`: their markers name files.
    "architectures": (architectures.table, "engines"),
    "image-models": (speeds.images, "engines"),
}
# {command of rows: tables that --out makes of a file in no group}
OTHERS = {
    "serve-compare": ("hosts", "tails", "loads", "engine"),
    "skinny_linear": ("linear",),
    "decode_attention": ("attention",),
    "patch-compare": (
        "models",
        "throughput",
        "engines",
        "text-models",
        "prompts",
        "contexts",
        "mixed",
        "undone",
    ),
    "formats": ("formats",),
    "e2e": ("image-models",),
    "architectures.py": ("architectures",),
}
DOCUMENTS = ("README.md", "docs/*.md", "docs/reports/*.md")
RESULTS = "bench/results"
FORMATS = "2026-11-27-h100 2026-11-28-h100 2026-11-28-h200"  # row files with number formats
# {figure: (function, its groups and files)}; a figure is made if a document shows it
FIGURES: dict[str, tuple[Callable[[Files], str], str]] = {
    "docs/assets/models.svg": (gains.figure, GROUP),
    "docs/assets/speedup.svg": (figure.speedup, "hosts"),
    "docs/assets/text-models.svg": (model_plot.text, "2026-11-speeds"),
    "docs/assets/patched-models.svg": (model_plot.patched, GROUP),
    "docs/assets/prompts.svg": (model_plot.prompts, "2026-11-30-h200-speeds 2026-11-30-h200-hosts"),
    "docs/assets/formats.svg": (model_plot.formats, FORMATS),
    "docs/assets/format-rates.svg": (model_plot.format_rates, FORMATS),
    "docs/assets/image-models.svg": (model_plot.images, "2026-11-speeds"),
    "docs/assets/pipelines.svg": (model_plot.pipelines, "2026-11-speeds"),
    "docs/assets/architectures.svg": (model_plot.others, "2026-11-30-h200-architectures"),
}
MARKER = re.compile(
    r"^<!-- table: *(?P<what>[^\n]*?) *-->\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
OPENING = re.compile(r"^<!-- table:", re.MULTILINE)


def text(what: str, results: Results) -> str:
    """Return the tables that a marker names, as Markdown. Raises ConfigError."""
    name, *files = what.split()
    if name not in TABLES:
        raise ConfigError(f"unknown table {name!r}; tables: {', '.join(TABLES)}")
    maker, group = TABLES[name]
    found, missing = results.load(*(files or [group]))
    made = "\n".join(_markdown(table) for table in maker(found))
    if not made and not results.lenient:
        raise ConfigError(f"table {name!r}: {', '.join(found)} has no row for it; name another file")
    return "\n".join([*missing, made or f"{name}: no rows.\n"])


def every(results: Results) -> list[str]:
    """Return the markers of all tables of these results: of every group, and of files in no group."""
    grouped = set(results.files(*GROUPS))
    made = list(TABLES)
    for name in results.names():
        if name not in grouped and (found := results.read(results.find(name))):
            made += [f"{table} {name}" for table in OTHERS.get(found[0].command, ())]
    return made


def _markdown(table: Table) -> str:
    title, columns, cells = table
    lines = [title, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])


def rewritten(document: str, results: Results, where: str = "") -> str:
    """Return the document with its tables made from the rows. Raises ConfigError, which begins with `where`."""

    def one(match: re.Match[str]) -> str:
        try:
            return f"<!-- table: {match['what']} -->\n{text(match['what'], results)}<!-- end -->"
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    bodies = [match["body"] for match in MARKER.finditer(document)]
    if len(OPENING.findall(document)) != len(bodies) or any(OPENING.search(body) for body in bodies):
        raise ConfigError(
            f"{where}: a `<!-- table: NAME -->` without its own `<!-- end -->`; both need a line to themselves"
        )
    return MARKER.sub(one, document)


def outputs(root: Path, results: Results) -> dict[str, tuple[str, str]]:
    """Return {document or figure: (current text, text by the rows)}. Raises ConfigError."""
    made: dict[str, tuple[str, str]] = {}
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            name, before = path.relative_to(root).as_posix(), path.read_text()
            made[name] = before, rewritten(before, results, name)
    documents = [before for before, _ in made.values()]
    for name, (draw, group) in FIGURES.items():
        if any(f"{Path(name).name})" in before for before in documents):
            path = root / name
            made[name] = path.read_text() if path.is_file() else "", draw(results.load(*group.split())[0])
    return made


def tables_command(
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="write nothing; print a diff and exit with 1 if a document is out of date"
        ),
    ] = False,
    root: Annotated[Path, typer.Option(help="the checkout with the documents")] = Path("."),
    results: Annotated[
        Path | None, typer.Option(help=f"folder of row files (default: ROOT/{RESULTS})")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write all tables of --results to this file, and no document")
    ] = None,
    take_from: Annotated[
        Path | None,
        typer.Option("--take", help="first copy the row files of this `make bench-h200` run to --results"),
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="[FOLDER=]NAME: name of a local model in tables (default: the folder's name)"),
    ] = None,
    json_only: Annotated[bool, typer.Option("--json", help="only the line of JSON")] = False,
) -> None:
    """Write the tables of README.md and docs/ and the README's figure from bench/results, or check them."""
    found = Results(results or root / RESULTS)
    if not found.folder.is_dir():
        fail(f"no such folder: {found.folder}; --root is the checkout, --results the folder of row files")
    models = {folder: name for folder, _, name in (given.rpartition("=") for given in model_name or ())}
    try:
        if out is not None:
            lenient = Results(found.folder, True, models)
            out.write_text("\n".join(f"## {name}\n\n{text(name, lenient)}" for name in every(lenient)))
            last_line({"command": "tables", "ok": True, "out": str(out)})
            return
        taken = take(take_from, found.folder, models) if take_from is not None else []
        changed = {name: texts for name, texts in outputs(root, found).items() if texts[0] != texts[1]}
        for name, (before, after) in changed.items():
            if check:
                if not json_only:
                    _show(name, before, after)
            else:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(after)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        fail(str(error))
    if not (check or json_only):
        print(f"written: {', '.join(changed)}" if changed else "every document is up to date")
    last_line({"command": "tables", "ok": not (check and changed), "changed": list(changed), "taken": taken})
    if check and changed:
        print(f"{', '.join(changed)}: out of date; run `fk-bench tables`", file=sys.stderr)
        raise SystemExit(1)


def _show(name: str, before: str, after: str) -> None:
    lines = before.splitlines(), after.splitlines()
    diff: Sequence[str] = list(difflib.unified_diff(*lines, name, f"{name} by its rows", lineterm="", n=1))
    print("\n".join(diff))
