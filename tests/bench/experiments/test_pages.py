"""Test of pages.py: its loads visit words that are 64 KiB apart, and begin again at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "bench/experiments/judge/pages.py"


def test_loads_are_apart_and_begin_again() -> None:
    """The script runs in its own process because Triton interprets kernels from import on."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"], capture_output=True, text=True, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=120,
    )  # fmt: skip
    assert json.loads(ran.stdout) == {"visited": [0, 1, 2, 0, 1]}
