"""Verified choices from one start to the next: a file for each chip and set of versions (core/kept_files.py)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastkernels.core import compile_cache, kept_files, tuning
from fastkernels.core.tuning import Table, TableError

log = logging.getLogger("fastkernels")

NAME = "verified"
SIDES = "compiled-sides"  # the folder of the choices between two sides of compiled code, which no table has


def kept(of: dict[str, str]) -> Table:
    """The choices that were measured before with the same facts. One log line if a file cannot be used."""
    folder = compile_cache.requested_folder(NAME)
    path = folder / kept_files.file_name(of)
    if not path.is_file():
        others = len(list(folder.glob(f"{tuning.slug(of['chip'])}-*.json"))) if folder.is_dir() else 0
        if others:
            log.info("choices of other versions in %s are not used (files: %d)", folder, others)
        return Table(of["chip"], {}, ())
    return _read(path, of)


def _read(path: Path, of: dict[str, str], level: int = logging.WARNING) -> Table:
    """The table of a file, without entries and with one log line if it cannot be used."""
    empty = Table(of["chip"], {}, ())
    try:
        table = tuning.read(path)
    except TableError as error:
        log.log(level, "choices are measured again: %s", error)
        return empty
    foreign = [run for run in table.runs.values() if run.get("facts") != of]
    if table.chip != of["chip"] or foreign:
        log.log(level, "%s is from another chip or other versions and is not used", path)
        return empty
    return table


def keep(table: Table, of: dict[str, str]) -> None:
    """Add a table's choices to the file of these facts. Without a writable folder they are measured at every start."""
    folder = compile_cache.folder(NAME)
    if folder is None:
        return
    path = folder / kept_files.file_name(of)
    with kept_files.alone(folder):
        before = _read(path, of, logging.DEBUG) if path.is_file() else Table(of["chip"], {}, ())
        kept_files.replace(path, before.merged(table).to_json())


def kept_sides(of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """{name of a call: its choice} from earlier processes with the same facts. One log line for a damaged file."""
    return kept_files.read(SIDES, of, _is_side)


def keep_side(name: str, side: dict[str, Any], of: dict[str, str]) -> None:
    """Add one choice to the file of these facts, if there is a writable folder."""
    kept_files.add(SIDES, of, {name: side}, _is_side)


def _is_side(given: Any) -> bool:
    return isinstance(given["ours"], bool) and isinstance(given["text"], str)
