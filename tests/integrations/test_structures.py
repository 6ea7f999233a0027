"""Real openfold3 on the CPU, in a process of its own: structures/check_models.py and check_patch.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.openfold3_library import library_path

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).parent / "structures"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["models", "patch"])
def test_models_of_openfold3(name: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTEST"))}
    folders = str(ROOT / "tests"), str(CHECKS), str(library_path())  # check_patch.py imports check_models.py
    path = os.pathsep.join(filter(None, [*folders, kept.get("PYTHONPATH")]))
    kept |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        str(CHECKS / f"check_{name}.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
