"""$FASTKERNELS_REPORT/HOST-RANK-PID.json: the report of each patched process, kept current in case it is killed."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastkernels.core.env import Environment

log = logging.getLogger("fastkernels")
PERIOD_S = 1.0
LIMIT_S = 10.0  # of a wait for processes that may be busy
_lock = threading.RLock()  # the thread and its process write the same files
_sources: dict[tuple[str, int], Callable[[], dict[str, Any] | None]] = {}
_thread: threading.Thread | None = None


def write(host: str, rank: int, reply: dict[str, Any]) -> None:
    """Write one reply, atomically. Does nothing without FASTKERNELS_REPORT."""
    folder = Environment.read().report
    if folder is None:
        return
    file = Path(folder) / f"{host}-{rank}-{os.getpid()}.json"
    partial = file.with_suffix(".partial")
    try:
        with _lock:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(reply))
            os.replace(partial, file)
    except OSError as error:
        log.warning("fastkernels: FASTKERNELS_REPORT=%s cannot be written: %s", folder, error)


def start(host: str, rank: int, reply: Callable[[], dict[str, Any] | None]) -> None:
    """Write `reply()` now, every second, and at exit; a reply of None ends that."""
    global _thread
    first = reply()
    if first is not None:
        write(host, rank, first)
    if Environment.read().report is None:
        return
    _sources[host, rank] = reply
    if _thread is None:
        _thread = threading.Thread(target=_refresh, name="fastkernels-report", daemon=True)
        _thread.start()
        atexit.register(_write_all)


def read(folder: str, host: str) -> list[dict[str, Any]]:
    """All replies in the folder, in rank order, with current counters."""
    _write_all()
    files = sorted(Path(folder).glob(f"{host}-*.json")) if folder else []
    now, until = time.time(), time.monotonic() + LIMIT_S
    while any(_outdated(file, now) for file in files) and time.monotonic() < until:
        time.sleep(0.05)
    return sorted((json.loads(f.read_text()) for f in files), key=lambda r: (r["rank"], r["pid"]))


def _outdated(file: Path, now: float) -> bool:
    """Whether another process that still runs has not written its file since `now`."""
    pid = int(file.stem.rpartition("-")[2])
    if pid == os.getpid() or file.stat().st_mtime >= now:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _write_all() -> None:
    with _lock:
        for (host, rank), reply in list(_sources.items()):
            found = reply()
            if found is None:
                if _sources.get((host, rank)) is reply:  # not another worker's by now
                    del _sources[host, rank]
            else:
                write(host, rank, found)


def _refresh() -> None:
    never = threading.Event()
    while not never.wait(PERIOD_S):
        _write_all()
