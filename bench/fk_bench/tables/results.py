"""A folder of row files, such as bench/results, and the groups of files that tables are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fk_bench.core import rows
from fk_bench.core.rows import Row
from fk_bench.core.terminal.flags import ConfigError

# Default row files of each group: the outputs of `make bench-h200`. tables.json in the folder names others. A group may
# contain groups; where two rows measure the same call, the file named first counts.
GROUPS = {
    "summary": ("servers-vllm", "servers-sglang"),
    "hosts": ("servers-vllm", "servers-sglang", "servers-fp8", "servers-tp2"),
    "engine": ("servers-vllm", "servers-256-vllm", "servers-sglang", "servers-256-sglang"),
    "kernels": ("kernels-norms", "kernels-attention", "kernels-experts", "kernels-layers"),
    "linear": ("skinny-linear",),
    "attention": ("decode-attention",),
    "explain": ("explain",),
    "models": ("patch-models",),
    "engines": ("patch-engine",),
    "models-patched": ("models", "engines"),
    "steps": ("kernels", "linear", "attention", "explain", "servers-vllm"),
}
DATED = re.compile(r"\d{4}-\d\d-")  # groups of a dated report begin with its month
MAPPING = "tables.json"


def expanded(group: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the row files of a group, including those of groups that it contains."""
    made: list[str] = []
    for name in groups[group]:
        made += expanded(name, groups) if name in groups and name != group else [name]
    return list(dict.fromkeys(made))


@dataclass(frozen=True)
class Results:
    """A folder of row files.

    lenient  describe missing files in the table's place instead of raising ConfigError
    models   {folder name of a model, or '' for any other: its name in tables} (default: the folder's name)
    """

    folder: Path
    lenient: bool = False
    models: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Path:
        """Return the row file of that name, which may leave out date and chip. Raises ConfigError if there is none."""
        files = self._files()
        for path in (files.get(name), self.folder / name / "rows.jsonl"):
            if path is not None and path.is_file():
                return path
        dated = re.compile(rf"\d{{4}}-\d\d-\d\d-[a-z0-9]+-{re.escape(name)}")
        if found := sorted(stem for stem in files if dated.fullmatch(stem)):
            return files[found[-1]]
        raise ConfigError(
            f"no rows {name!r} in {self.folder}: add {name}.jsonl.xz (`make bench-h200 TABLES=1` does), or name "
            f"another file in the marker or in {MAPPING}"
        )

    def names(self) -> list[str]:
        """Return the names of all files and run folders here that may have rows."""
        found = [path.parent.name for path in self.folder.glob("*/rows.jsonl")]
        return sorted({*self._files(), *found})

    def _files(self) -> dict[str, Path]:
        """Return {name: row file} of the files in the folder itself."""
        return {
            rows.stem(p): p
            for suffix in (rows.SUFFIX, rows.COMPRESSED)
            for p in self.folder.glob(f"*{suffix}")
        }

    def read(self, path: Path) -> list[Row]:
        """Return the rows of a file, with local models by name. Raises ConfigError for lines that are no rows and
        for provisional rows."""
        found, warnings = rows.read(path)
        if warnings and not self.lenient:
            raise ConfigError(f"{warnings[0]}: fix or remove the line")
        if why := rows.provisional(found):
            raise ConfigError(f"{path} is provisional and has no scores for a table. {why}")
        for row in found:
            model = row.subject.model or ""
            if model.startswith(("/", "~", ".")) or model.count("/") > 1:  # not a hub's OWNER/NAME
                name = Path(model).name
                row.subject.model = self.models.get(name) or self.models.get("") or name
        return found

    def groups(self) -> dict[str, Sequence[str]]:
        """Return all groups. Raises ConfigError for an unknown group in tables.json."""
        path = self.folder / MAPPING
        named = json.loads(path.read_text()) if path.is_file() else {}
        if unknown := [g for g in named if g not in GROUPS and not DATED.match(g)]:
            raise ConfigError(
                f"{path}: unknown group {', '.join(unknown)}; groups: {', '.join(GROUPS)}, YYYY-MM-NAME"
            )
        return {**GROUPS, **named}

    def files(self, *names: str) -> list[str]:
        """Return the row files of these groups and files, each once."""
        groups = self.groups()
        return list(dict.fromkeys(f for n in names for f in (expanded(n, groups) if n in groups else [n])))

    def load(self, *names: str) -> tuple[dict[str, list[Row]], list[str]]:
        """Return ({file: its rows}, missing files as text) of these groups and files. Raises ConfigError."""
        found: dict[str, list[Row]] = {}
        missing = []
        for file in self.files(*names):
            try:
                path = self.find(file)
            except ConfigError as error:
                if not self.lenient:
                    raise
                missing.append(f"{error}\n")
                continue
            found[rows.stem(path) if path.name != "rows.jsonl" else path.parent.name] = self.read(path)
        return found, missing


def take(folder: Path, results: Path, models: Mapping[str, str] | None = None) -> list[str]:
    """Copy the row files of a `make bench-h200` run to `results`; return their names, made of date, chip and part.

    A group whose files are all in the run is made of them from then on. No file is overwritten, paths of the
    machine are replaced by '...', and numbers have six significant digits. Raises ConfigError if the run has no rows.
    """
    source, taken = Results(folder, True, models or {}), dict[str, str]()
    for name in source.names():
        if read := source.read(source.find(name)):
            text = "".join(json.dumps(published(json.loads(row.to_json()))) + "\n" for row in read)
            taken[name] = _kept(results, name, read[-1], text)
    if not taken:
        raise ConfigError(f"--take {folder}: no rows there; give the folder of a run (OUT=)")
    mapping = results / MAPPING
    named = json.loads(mapping.read_text()) if mapping.is_file() else {}
    for group, names in GROUPS.items():
        if set(expanded(group, GROUPS)) <= set(taken):
            named[group] = [taken[n] if group == n or n not in GROUPS else n for n in names]
    lines = ",\n".join(f" {json.dumps(group)}: {json.dumps(names)}" for group, names in named.items())
    mapping.write_text(f"{{\n{lines}\n}}\n")
    return list(taken.values())


def _kept(results: Path, name: str, last: Row, text: str) -> str:
    """Write a row file under an unused name, or under the name that already has these rows; return the name."""
    chip = re.sub(r"[^a-z0-9]", "", (last.machine.gpu or "cpu").lower().removeprefix("nvidia"))
    for number in count(1):
        stem = f"{last.time[:10]}-{chip}-{name}{f'-{number}' if number > 1 else ''}"
        path = results / f"{stem}{rows.COMPRESSED}"
        if not path.exists():
            rows.write_compressed(path, text)
        if rows.read_text(path) == text:
            break
    return stem


def published(value: Any) -> Any:
    """Return a row's value without paths of the machine, and with numbers of six significant digits."""
    if isinstance(value, dict):
        return {k: published(v) for k, v in value.items()}
    if isinstance(value, list):
        return [published(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return "..." if isinstance(value, str) and value.startswith(("/", "~/")) else value
