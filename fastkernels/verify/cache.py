"""The file that keeps verified choices from one start to the next: one for each chip and set of versions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import compile_cache, tuning
from fastkernels.core.env import Environment
from fastkernels.core.tuning import Table, TableError

log = logging.getLogger("fastkernels")

LIBRARY = Path(__file__).resolve().parents[1]
NAME = "verified"
SIDES = "compiled-sides"  # the folder of the choices between two sides of compiled code, which no table has
DRIVER = Path("/proc/driver/nvidia/version")


def facts(chip: str, host: str, host_version: str) -> dict[str, str]:
    """All that times depend on, aside from the shapes. Choices of other facts are measured again."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {
        "chip": chip,
        "driver": _driver(),
        "torch": str(torch.__version__),
        "triton": triton,
        "host": f"{host} {host_version}",
        "sources": source_digest(LIBRARY),
        "overlap": str(Environment.read().overlap),
    }


def _driver() -> str:
    try:
        found = re.search(r"Module\s.*?(\d+\.\d[\d.]*)", DRIVER.read_text())
    except OSError:
        return "none"
    return found[1] if found else "unknown"


def file_name(of: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(of.items())).encode()).hexdigest()[:16]
    return f"{tuning.slug(of['chip'])}-{digest}.json"


def kept(of: dict[str, str]) -> Table:
    """The choices that were measured before with the same facts. One log line if a file cannot be used."""
    folder = compile_cache.requested_folder(NAME)
    path = folder / file_name(of)
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
    path = folder / file_name(of)
    before = _read(path, of, logging.DEBUG) if path.is_file() else Table(of["chip"], {}, ())
    _replace(path, before.merged(table).to_json())


def kept_sides(of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """{name of a call: its choice} from earlier processes with the same facts. One log line for a damaged file."""
    return _sides(compile_cache.requested_folder(SIDES) / file_name(of), of)


def _sides(path: Path, of: dict[str, str]) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
        if found and found["facts"] != of:
            raise ValueError("it is of other facts")
        sides = found.get("sides", {})
        if any(
            not isinstance(s.get("ours"), bool) or not isinstance(s.get("text"), str) for s in sides.values()
        ):
            raise ValueError("a choice lacks `ours` or `text`")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("choices are measured again: %s: %s", path, error)
        return {}
    return dict(sides)


def keep_side(name: str, side: dict[str, Any], of: dict[str, str]) -> None:
    """Add one choice to the file of these facts, if there is a writable folder."""
    folder = compile_cache.folder(SIDES)
    if folder is None:
        return
    path = folder / file_name(of)
    sides = {**_sides(path, of), name: side}
    _replace(path, json.dumps({"facts": of, "sides": sides}, indent=1, sort_keys=True))


def _replace(path: Path, text: str) -> None:
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        log.warning("verified choices were not kept, and the next start measures them again: %s", error)
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


def source_digest(root: Path) -> str:
    """A hash of the path and content of every file under a package, compiled Python aside. Raises ValueError, OSError.

    Every file counts, whatever its suffix: kernels, tables, headers.
    """
    files = sorted(
        f for f in root.rglob("*") if "__pycache__" not in f.relative_to(root).parts and not f.is_dir()
    )
    if not any(file.suffix == ".py" for file in files):
        raise ValueError(f"{root} has no Python source to hash: compiled code could not be told apart")
    digest = hashlib.sha256()
    for file in files:
        add_piece(digest, file.relative_to(root).as_posix(), file.read_bytes())
    return digest.hexdigest()


def add_piece(digest: Any, name: str, data: bytes) -> None:
    """Add one named piece, with its lengths: no two lists of pieces give the same bytes."""
    digest.update(f"{len(name.encode())}:{len(data)}:{name}".encode() + data)
