"""A built wheel contains every file of the packages: tables, signatures, templates, captures and CUDA sources too."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fastkernels": "fastkernels",
    "integrations/fk_integrations": "fk_integrations",
    "bench/fk_bench": "fk_bench",
}


def test_wheel_contains_every_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=skipped)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        source,
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    there = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{package}/{file.relative_to(ROOT / folder)}"
        for folder, package in PACKAGES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {Path(name).suffix for name in wanted} >= {".py", ".cu", ".json", ".safetensors"}
    assert wanted - there == set()
