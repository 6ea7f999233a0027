"""`fk-bench serve` as a process of its own: start it, and check how it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from fk_bench.serving.process import free_port

FK_BENCH = [sys.executable, "-m", "fk_bench.cli", "serve"]


def start(
    folder: Path,
    *args: str,
    env: dict[str, str] | None = None,
    log: IO[str] | None = None,
    num_blocks: int | None = 200,
) -> tuple[subprocess.Popen[str], str]:
    """(process, url) of a running server. log: file for its output (default: a pipe, which holds 64 KiB)."""
    port = free_port()
    blocks = [] if num_blocks is None else ["--num-blocks", str(num_blocks)]
    command = [*FK_BENCH, str(folder), "--port", str(port), "--device", "cpu", *blocks, *args]
    out: Any = subprocess.PIPE if log is None else log
    process = subprocess.Popen(command, env={**os.environ, **(env or {})}, stderr=out, stdout=out, text=True)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()  # cheaper than a client of httpx
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return process, url
        except (OSError, httpx.TransportError):
            time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[1] or f"no server: see {log and log.name}")


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str]:
    """(exit status, standard error if it is a pipe). Asserts that no child process is left."""
    children = psutil.Process(process.pid).children(recursive=True)
    status = process.wait(seconds)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    return status, process.stderr.read() if process.stderr is not None else ""


def marked(name: str, value: str) -> list[psutil.Process]:
    """Every process on the machine with this variable in its environment, whatever its parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found
