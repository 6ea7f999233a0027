"""The environments of tests and demo: what a change of pyproject.toml rebuilds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import environments


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that environments.py reads."""
    support = tmp_path / "tests" / "support"
    shutil.copytree(environments.SUPPORT / "cpu_hosts", support / "cpu_hosts")
    shutil.copy(environments.SUPPORT / "constraints.txt", support)
    shutil.copy(environments.ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "SUPPORT", support)
    return tmp_path


def state(name: str) -> tuple[str, str]:
    return environments.key(name), environments.installed_sources(name)


@pytest.mark.parametrize(
    ("old", "new", "packages"),
    [
        ('fk-bench = "', 'fk-bench-too = "', False),  # an entry point
        ("line-length = 110", "line-length = 111", False),
        ('"numpy>=1.26', '"numpy>=1.27', True),
        ('timm = ["timm', 'timm = ["torch", "timm', True),
    ],
)
def test_only_dependencies_rebuild_packages(project: Path, old: str, new: str, packages: bool) -> None:
    before = {name: state(name) for name in environments.FOLDERS}
    file = project / "pyproject.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    after = {name: state(name) for name in environments.FOLDERS}
    assert (before["own"][0] != after["own"][0]) == packages
    for name in environments.FOLDERS:
        assert before[name][1] != after[name][1], f"{name} would not be installed again"
    assert before["vllm"][0] == after["vllm"][0] and before["sglang"][0] == after["sglang"][0]


def test_build_folders_do_not_count(project: Path) -> None:
    before = state("sglang")
    build = project / "tests/support/cpu_hosts/sglang/build/lib"
    build.mkdir(parents=True)
    (build / "old.py").write_text("x = 1\n")
    assert state("sglang") == before
