"""Runs of serve-compare in this process, against a server that is already running."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row, read
from fk_bench.serving.compare.serve_compare import Compare, prepare
from fk_bench.serving.config import CompareConfig
from fk_bench.serving.lanes import parse_lanes
from fk_bench.serving.process import free_port
from rich.console import Console


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts connections."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert server.poll() is None, f"the server ended with exit status {server.returncode}"
        time.sleep(0.05)
    raise TimeoutError(f"no connection to port {port} in 120 s")


@contextlib.contextmanager
def stub(python: Path, **env: str) -> Iterator[str]:
    """The URL of a stub server; `env` selects what it does."""
    port = free_port()
    server = subprocess.Popen(
        [str(python), "-m", "x", "--port", str(port)], stdout=subprocess.DEVNULL, env={**os.environ, **env}
    )
    try:
        wait_for_port(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def attached(
    model: Path, url: str, out: Path, lane: str = "vllm", **options: Any
) -> tuple[dict[str, Any], list[Row]]:
    """(the JSON line, the rows of its loads) of a successful run, by default of one round; one in `out` is resumed."""
    resume = (out / "run.json").exists()
    if resume:
        config = CompareConfig.load(out / "run.json")
    else:
        given = {"rounds": 1, "agreement_prompts": 0, "concurrency": (), **options}
        config = CompareConfig(model=str(model), lanes=(lane,), attach={lane: url}, **given)
    config = prepare(config, out, resume)
    line = Compare(config, parse_lanes(config.lanes, attach=config.attach), out, Console(quiet=True)).run()
    rows, warnings = read(out / "rows.jsonl")
    assert line["ok"] and not warnings, [r.reason for r in rows if r.reason]
    return line, [r for r in rows if r.kind in ("round", "probe", "profile")]
