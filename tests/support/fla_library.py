"""flash-linear-attention in a folder of its own, in the cache: in an environment of transformers it replaces functions.

`python tests/support/fla_library.py` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("flash-linear-attention", "fla-core")


def library_path(version: str = "0.6.0") -> Path:
    """The folder of the packages, without their dependencies; installs them first if they are not in the cache."""
    return installed(f"fla-{version}", [*(f"{name}=={version}" for name in PACKAGES), "einops==0.8.2"])


def installed(name: str, packages: Sequence[str]) -> Path:
    """A folder of the cache with these packages alone; installs them first if it is not there."""
    from fastkernels.core.env import Environment

    folder = Path(Environment.read().cache) / "libraries" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            options = ("-q", "--no-deps", "--target", str(made))
            command = [sys.executable, "-m", "pip", "install", *options, *packages]
            subprocess.run(command, check=True, stdout=sys.stderr)
            try:
                os.replace(made, folder)
            except OSError:  # another process was first
                shutil.rmtree(made, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(library_path())
