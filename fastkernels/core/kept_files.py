"""Files that keep what was measured from one process to the next: one for each chip and set of versions."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import compile_cache, tuning
from fastkernels.core.env import Environment

log = logging.getLogger("fastkernels")

LIBRARY = Path(__file__).resolve().parents[1]
DRIVER = Path("/proc/driver/nvidia/version")
LOCK_TRIES, LOCK_WAIT_S = 100, 0.01  # of a lock that another process holds for a write


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


def read(name: str, of: dict[str, str], valid: Callable[[Any], bool]) -> dict[str, Any]:
    """{key: entry} of FASTKERNELS_CACHE/name from processes with the same facts.

    One log line for a file that cannot be used, or that has an entry for which valid(entry) is false.
    """
    return _entries(compile_cache.requested_folder(name) / file_name(of), of, valid)


def add(name: str, of: dict[str, str], new: Mapping[str, Any], valid: Callable[[Any], bool]) -> None:
    """Add entries to the file that `read` reads, if there is a writable folder. Processes may do so at once."""
    folder = compile_cache.folder(name)
    if folder is None:
        return
    path = folder / file_name(of)
    with alone(folder):
        entries = {**_entries(path, of, valid), **new}
        replace(path, json.dumps({"facts": of, "entries": entries}, indent=1, sort_keys=True))


def _entries(path: Path, of: dict[str, str], valid: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
        if found and found["facts"] != of:
            raise ValueError("it is of other facts")
        entries = dict(found.get("entries", {}))
        if wrong := [key for key, entry in entries.items() if not valid(entry)]:
            raise ValueError(f"the entry {wrong[0]!r} is damaged")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("choices are measured again: %s: %s", path, error)
        return {}
    return entries


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Other processes wait for this one, but not for long, and not where files cannot be locked."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(folder / ".lock", "a"))
            for _ in range(LOCK_TRIES):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(LOCK_WAIT_S)
        except OSError as error:
            log.debug("%s is not locked: %s", folder, error)
        yield


def replace(path: Path, text: str) -> None:
    """Write a file at once, so that other processes read the old one or the new one. One log line if that fails."""
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        log.warning("measured choices were not kept, and the next start measures them again: %s", error)
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
