"""The audit of many files: in several processes, each file with a limit of CPU time, which load does not change."""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil

from fk_bench.coverage.audit import Coverage, Row

START = 60.0  # CPU seconds more for the first file of a process, which imports transformers
LIMIT = 300.0  # CPU seconds of a file
HANG = 3600.0  # seconds of a file that does not compute: it waits for something


def run(files: list[str], workers: int, done: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """The rows of the files, in their order. A file that crashes or passes its limit fails; the rest goes on."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in files:
        todo.put(file)
    rows: dict[str, Row] = {}
    threads = [
        threading.Thread(target=_work, args=(todo, rows, done)) for _ in range(min(workers, len(files)) or 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[file] for file in files]


def _work(todo: queue.SimpleQueue[str], rows: dict[str, Row], done: Callable[[Row], None]) -> None:
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            file = todo.get_nowait()
        except queue.Empty:
            break
        limit = LIMIT
        if process is None:
            process, limit = _start(), START + LIMIT
        row = _answer(process, file, limit)
        if row is None:
            process.kill()
            status = process.wait()
            reason = (
                f"no answer in {limit:.0f} s of CPU time"
                if status == -9
                else f"the process ended with status {status}"
            )
            row, process = Row(file, Coverage.FAILED, error=reason), None
        rows[file] = row
        done(row)
    if process is not None and process.stdin is not None:
        process.stdin.close()
        process.wait()


def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fk_bench.coverage.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, bufsize=1, env=environment,
    )  # fmt: skip


def _answer(process: subprocess.Popen[str], file: str, limit: float) -> Row | None:
    """The row that the process answers; None after the limit of CPU time, or if the process ends."""
    assert process.stdin is not None and process.stdout is not None
    end, used = time.monotonic() + HANG, _cpu_seconds(process.pid)
    try:
        print(file, file=process.stdin, flush=True)
    except BrokenPipeError:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not selector.select(0.2):
            if _cpu_seconds(process.pid) - used > limit or time.monotonic() > end:
                return None
    line = process.stdout.readline()  # a worker writes whole lines
    return Row.from_dict(json.loads(line)) if line.endswith("\n") else None


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; 0 after its end."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
