"""Real ultralytics on the CPU, in a process of its own: detectors/check_patch.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ultralytics_library import library_path

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).parent / "detectors" / "check_patch.py"


@pytest.mark.slow
def test_detectors_of_ultralytics() -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTEST"))}
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), str(library_path()), kept.get("PYTHONPATH")]))
    kept |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(CHECK)]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
