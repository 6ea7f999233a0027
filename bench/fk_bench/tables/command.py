"""`fk-bench tables`: the tables of README.md and docs/*.md, made from row files.

A document holds `<!-- table: NAME [FILE ...] -->`, the table, and `<!-- end -->`. What stands between is written here
and nowhere else; --check fails where it is not what the rows say. FILE is a row file without its folder and '.jsonl';
without any, those of the table's group count: what bench/results/tables.json names, else GROUPS. FILE may leave out
date and chip ('servers' is the newest '2026-11-21-h200-servers'), and may be a run's folder with rows.jsonl.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from fk_bench.core import rows
from fk_bench.core.output import fail, last_line
from fk_bench.core.rows import Row
from fk_bench.explain.tables import Table
from fk_bench.serving.config import ConfigError
from fk_bench.tables import experiments as tables_scenarios
from fk_bench.tables import measured as tables_made
from fk_bench.tables import savings_tables as pays_tables
from fk_bench.tables.measured import Files

Maker = Callable[[Files], Iterator[Table]]
# What tables are made of, a group of row files each, where bench/results/tables.json says nothing else: what
# `make bench-h200` writes. A group may name others; where two rows say the same in 'pays', that of the first counts.
GROUPS = {
    "servers": ("servers-vllm",),
    "kernels": ("kernels-norms", "kernels-attention", "kernels-experts", "kernels-layers"),
    "linear": ("skinny-linear",),
    "attention": ("decode-attention",),
    "step": ("decode-step",),
    "explain": ("explain",),
    "pays": ("kernels", "linear", "attention", "explain", "servers"),
}
# name: (what makes it, of which group)
TABLES: dict[str, tuple[Maker, str]] = {
    "servers": (tables_made.servers, "servers"),
    "servers-tails": (tables_made.servers_tails, "servers"),
    "kernels": (tables_made.kernels, "kernels"),
    "linear": (tables_scenarios.linear, "linear"),
    "linear-layers": (tables_scenarios.linear_layers, "linear"),
    "attention": (tables_scenarios.attention, "attention"),
    "step": (tables_scenarios.decode_step, "step"),
    "explain": (tables_scenarios.explain, "explain"),
    "pays": (pays_tables.by_op, "pays"),
    "predicted": (pays_tables.predicted, "pays"),
    "realized": (pays_tables.realized, "pays"),
}
# command of rows: the tables that files of no group have in `--out`
OTHERS = {
    "serve-compare": ("servers", "servers-tails"),
    "skinny_linear": ("linear", "linear-layers"),
    "decode_attention": ("attention",),
}
DOCUMENTS = ("README.md", "docs/performance.md", "docs/performance-log.md")
RESULTS, MAPPING = "bench/results", "tables.json"
MARKER = re.compile(
    r"^<!-- table: *(?P<what>[^\n]*?) *-->\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
OPENING = re.compile(r"^<!-- table:", re.MULTILINE)


def _files(group: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The row files of a group, those of other groups that it names among them."""
    made: list[str] = []
    for name in groups[group]:
        made += _files(name, groups) if name in groups and name != group else [name]
    return list(dict.fromkeys(made))


@dataclass(frozen=True)
class Results:
    """A folder of row files.

    lenient  what is missing is said in the table's place, not raised
    models   what rows call a model that was a folder, by the folder's name ('': any other); else that name
    """

    folder: Path
    lenient: bool = False
    models: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Path:
        """The row file of that name. Raises ConfigError if there is none."""
        for path in (self.folder / f"{name}.jsonl", self.folder / name / "rows.jsonl"):
            if path.is_file():
                return path
        dated = re.compile(rf"\d{{4}}-\d\d-\d\d-[a-z0-9]+-{re.escape(name)}\.jsonl")
        if found := sorted(p for p in self.folder.glob(f"*-{name}.jsonl") if dated.fullmatch(p.name)):
            return found[-1]
        raise ConfigError(
            f"no rows {name!r} in {self.folder}: put {name}.jsonl there (`make bench-h200 TABLES=1` does), or name "
            f"another file after the table's name, in the marker or in {MAPPING}"
        )

    def names(self) -> list[str]:
        """Of all files and runs' folders here that may have rows."""
        runs = [path.parent.name for path in self.folder.glob("*/rows.jsonl")]
        return sorted({*(path.stem for path in self.folder.glob("*.jsonl")), *runs})

    def read(self, path: Path) -> list[Row]:
        """The rows of a file, a model's folder by its name. Raises ConfigError for a line that is no row."""
        found, warnings = rows.read(path)
        if warnings and not self.lenient:
            raise ConfigError(f"{warnings[0]}: mend or remove the line")
        for row in found:
            model = row.subject.model or ""
            if model.startswith(("/", "~", ".")) or model.count("/") > 1:  # not a hub's OWNER/NAME
                name = Path(model).name
                row.subject.model = self.models.get(name) or self.models.get("") or name
        return found

    def files(self, group: str) -> list[str]:
        """The row files of a group. Raises ConfigError for a group in the mapping that there is not."""
        path = self.folder / MAPPING
        said = json.loads(path.read_text()) if path.is_file() else {}
        if unknown := set(said) - set(GROUPS):
            raise ConfigError(f"{path}: {', '.join(sorted(unknown))}: not one of {', '.join(GROUPS)}")
        return _files(group, {**GROUPS, **said})

    def every(self) -> list[str]:
        """What markers ask for to have all tables: those of the groups, and those of files that are in no group."""
        grouped = {file for group in GROUPS for file in self.files(group)}
        made = list(TABLES)
        for name in self.names():
            if name not in grouped and (found := self.read(self.find(name))):
                made += [f"{table} {name}" for table in OTHERS.get(found[0].command, ())]
        return made

    def text(self, what: str) -> str:
        """The tables that a marker asks for, as Markdown. Raises ConfigError."""
        name, *files = what.split()
        if name not in TABLES:
            raise ConfigError(f"there is no table {name!r}: {', '.join(TABLES)}")
        found: dict[str, list[Row]] = {}
        missing = []
        for file in files or self.files(TABLES[name][1]):
            try:
                path = self.find(file)
            except ConfigError as error:
                if not self.lenient:
                    raise
                missing.append(f"{error}\n")
                continue
            found[path.stem if path.stem != "rows" else path.parent.name] = self.read(path)
        made = "\n".join(_markdown(t) for t in TABLES[name][0](found))
        if not made and not self.lenient:
            raise ConfigError(f"table {name!r}: {', '.join(found)} has no row for it; name another file")
        return "\n".join([*missing, made or f"{name}: nothing was measured.\n"])


def _markdown(table: Table) -> str:
    title, columns, cells = table
    lines = [title, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])


def rewritten(text: str, results: Results, where: str = "") -> str:
    """The document with its tables as the rows say. Raises ConfigError, which begins with `where`."""

    def one(match: re.Match[str]) -> str:
        try:
            return f"<!-- table: {match['what']} -->\n{results.text(match['what'])}<!-- end -->"
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    bodies = [match["body"] for match in MARKER.finditer(text)]
    if len(OPENING.findall(text)) != len(bodies) or any(OPENING.search(body) for body in bodies):
        raise ConfigError(
            f"{where}: a `<!-- table: NAME -->` has no `<!-- end -->` of its own, each on a line alone"
        )
    return MARKER.sub(one, text)


def take(folder: Path, results: Path, models: Mapping[str, str] | None = None) -> list[str]:
    """Copy the row files of a run of `make bench-h200` to `results`, named by date and chip, and let the groups whose
    files are all there be made of them. Returns the names. Nothing there is overwritten, and paths of the machine are
    left out. Raises ConfigError if there are none."""
    source, taken = Results(folder, True, models or {}), dict[str, str]()
    for name in source.names():
        if read := source.read(source.find(name)):
            text = "".join(json.dumps(_without_paths(json.loads(row.to_json()))) + "\n" for row in read)
            taken[name] = _kept(results, name, read[-1], text)
    if not taken:
        raise ConfigError(f"--take {folder}: no file there has rows; it is the folder of a run (OUT=)")
    mapping = results / MAPPING
    said = json.loads(mapping.read_text()) if mapping.is_file() else {}
    for group, names in GROUPS.items():
        if set(_files(group, GROUPS)) <= set(taken):
            said[group] = [taken[n] if group == n or n not in GROUPS else n for n in names]
    lines = ",\n".join(f" {json.dumps(group)}: {json.dumps(names)}" for group, names in said.items())
    mapping.write_text(f"{{\n{lines}\n}}\n")
    return list(taken.values())


def _kept(results: Path, name: str, last: Row, text: str) -> str:
    """Write a row file under a name of its own, which is returned."""
    chip = re.sub(r"[^a-z0-9]", "", (last.machine.gpu or "cpu").lower().removeprefix("nvidia"))
    for number in count(1):
        stem = f"{last.time[:10]}-{chip}-{name}{f'-{number}' if number > 1 else ''}"
        path = results / f"{stem}.jsonl"
        if not path.exists():
            path.write_text(text)
        if path.read_text() == text:
            break
    return stem


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_paths(v) for v in value]
    return "..." if isinstance(value, str) and value.startswith(("/", "~/")) else value


def tables_command(
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit status 1 and a diff where a table differs")
    ] = False,
    root: Annotated[Path, typer.Option(help="the checkout with the documents")] = Path("."),
    results: Annotated[
        Path | None, typer.Option(help=f"folder of row files (default: ROOT/{RESULTS})")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="write all tables of --results there, and no document")
    ] = None,
    take_from: Annotated[
        Path | None,
        typer.Option("--take", help="first copy the row files of this run of `make bench-h200` to --results"),
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="[FOLDER=]NAME: what to call a model that was this folder, or any (default: its name)"
        ),
    ] = None,
) -> None:
    """Write the tables of README.md and docs/ anew from the rows under bench/results, or check that they are right."""
    found = Results(results or root / RESULTS)
    if not found.folder.is_dir():
        fail(f"no such folder: {found.folder}; --root names the checkout, --results the folder of row files")
    models = {folder: name for folder, _, name in (given.rpartition("=") for given in model_name or ())}
    changed = []
    try:
        if out is not None:
            lenient = Results(found.folder, True, models)
            out.write_text("\n".join(f"## {name}\n\n{lenient.text(name)}" for name in lenient.every()))
            last_line({"command": "tables", "ok": True, "out": str(out)})
            return
        taken = take(take_from, found.folder, models) if take_from is not None else []
        for name in DOCUMENTS:
            path = root / name
            before = path.read_text()
            after = rewritten(before, found, name)
            if after != before:
                changed.append(name)
                _show(name, before, after) if check else path.write_text(after)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        fail(str(error))
    last_line({"command": "tables", "ok": not (check and changed), "changed": changed, "taken": taken})
    if check and changed:
        print(
            f"{', '.join(changed)}: not what the rows say; `fk-bench tables` writes them anew",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _show(name: str, before: str, after: str) -> None:
    diff: Sequence[str] = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), name, f"{name}, by its rows", lineterm="", n=1
        )
    )
    print("\n".join(diff))
