"""Runs fk-bench as a user does, in a process of its own (a fork of one that has imported torch) or in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from support.kernels import warm

BIN = Path(sys.executable).with_name("fk-bench")


def fk_bench(
    *args: object, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    return warm.run([BIN, *args], {**os.environ, **(env or {})}, timeout=timeout)


def fk_bench_here(*args: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, without the 2 seconds of imports; an exception that a user would see is raised."""
    from fk_bench import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(map(str, args)))
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(["fk-bench", *map(str, args)], status, out.getvalue(), err.getvalue())


def last_json(result: subprocess.CompletedProcess[str]) -> dict:
    """The line that ends standard output."""
    assert result.stdout.strip(), result.stderr
    return json.loads(result.stdout.splitlines()[-1])
