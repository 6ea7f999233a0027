"""Real flash-linear-attention on the CPU, in Triton's interpreter and a process of its own: fla/check_models.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fla_library import library_path

pytest.importorskip("transformers")
pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).parent / "fla" / "check_models.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("version", "chosen"),
    [("0.6.0", ""), ("0.5.2", "not loaded")],  # transformers 5 saves no model of 0.5
    ids=["new", "old"],
)
def test_models_of_flash_linear_attention(version: str, chosen: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTEST"))}
    path = os.pathsep.join(
        filter(None, [str(ROOT / "tests"), str(library_path(version)), kept.get("PYTHONPATH")])
    )
    kept |= {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", "-k", chosen, str(CHECK)]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
