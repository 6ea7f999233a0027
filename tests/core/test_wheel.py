"""A built wheel has every file that the code reads at run time."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Files that are no Python, by the folder that they are installed from
DATA = {
    "fastkernels": (
        ROOT,
        ("tuned/*.json", "overrides/*/csrc/*.cu", "overrides/*/csrc/*.cpp", "overrides/*/csrc/*.hpp"),
    ),
    "fk_integrations": (ROOT / "integrations", ("*/signatures/*.json",)),
    "fk_bench": (ROOT / "bench", ("core/templates/*", "capture/data/*/*")),
}


@pytest.mark.slow
def test_wheel_has_sources_and_data(tmp_path: Path) -> None:
    # A copy of what git tracks: building must leave no folder in the checkout
    source = tmp_path / "source"
    source.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if name.startswith(("fastkernels/", "integrations/", "bench/fk_bench/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(built).namelist())
    for package, (folder, patterns) in DATA.items():
        files = {
            p for pattern in ("**/*.py", *patterns) for p in (folder / package).glob(pattern) if p.is_file()
        }
        for pattern in patterns:
            assert any((folder / package).glob(pattern)), f"{package} has no file {pattern}"
        missing = sorted(str(p.relative_to(folder)) for p in files if str(p.relative_to(folder)) not in names)
        assert not missing, missing
        others = {
            p.relative_to(folder).as_posix()
            for p in (folder / package).rglob("*")
            if p.is_file() and p.suffix not in (".py", ".pyc", ".so")
        }
        assert others <= names, f"not in package-data of pyproject.toml: {sorted(others - names)}"
