"""Runs fk-bench as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).with_name("fk-bench")


def fk_bench(
    *args: object, env: dict[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    command = [str(BIN), *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}
    )


def last_json(result: subprocess.CompletedProcess[str]) -> dict:
    """The line that ends standard output."""
    assert result.stdout.strip(), result.stderr
    return json.loads(result.stdout.splitlines()[-1])
