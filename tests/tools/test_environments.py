"""The environments of tests and demo: their locks, the limits of pyproject.toml, and what a change rebuilds."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support import environments

LOCKED = sys.prefix == str(environments.ROOT / environments.FOLDERS["own"]) and not environments.has_gpu()
# Kernel libraries and hosts, which run on GPUs only, and CUDA's packages, whose limit is the major version
ON_GPUS = {
    "vllm", "sglang", "flashinfer-python", "flash-attn", "deep-gemm", "cuda-bindings", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files that environments.py reads."""
    support = tmp_path / "tests" / "support"
    shutil.copytree(environments.SUPPORT / "cpu_hosts", support / "cpu_hosts")
    shutil.copytree(environments.SUPPORT / "locks", support / "locks")
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


@pytest.mark.parametrize("name", environments.FOLDERS)
def test_changed_lock_rebuilds_its_environment(project: Path, name: str) -> None:
    before = {other: environments.key(other) for other in environments.FOLDERS}
    with environments.lock_file(name).open("a") as file:
        file.write("made-up==1.0\n")
    after = {other: environments.key(other) for other in environments.FOLDERS}
    assert {other for other in before if before[other] != after[other]} == {name}


def constraints(file: Path) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return {canonicalize_name(found.name): found for line in lines if line for found in [Requirement(line)]}


def locked(name: str) -> dict[str, Version]:
    found = constraints(environments.lock_file(name))
    return {key: Version(next(iter(line.specifier)).version) for key, line in found.items()}


def required(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """The names of the packages that an installed one requires here, itself included."""
    key = (canonicalize_name(name), extras)
    if key in seen:
        return
    seen.add(key)
    yield key[0]
    for text in importlib.metadata.requires(name) or ():
        line = Requirement(text)
        if any(line.marker is None or line.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield from required(line.name, frozenset(line.extras), seen)


@pytest.mark.skipif(
    not LOCKED, reason="this is not the environment of `make setup` on a machine without a GPU"
)
def test_environment_is_the_lock() -> None:
    """All packages that ours requires are in the lock, with the installed versions: the tested set."""
    names = set(required("fastkernels", frozenset({"dev"}), set())) - {"fastkernels", "setuptools"}
    versions = {name: Version(Version(importlib.metadata.version(name)).public) for name in names}
    lock = locked("own")
    differing = {n: (str(v), str(lock.get(n))) for n, v in versions.items() if lock.get(n) != v}
    assert not differing, f"{differing}: run {environments.__file__} lock own"


@pytest.mark.skipif(not LOCKED, reason="the packages that ours requires are known from the installed ones")
def test_newest_lock_has_all_packages() -> None:
    """A package that was added to our lock is in the newest lock, too, and is no older there."""
    names = set(required("fastkernels", frozenset({"dev"}), set())) - {"fastkernels", "setuptools"}
    lock, newest = locked("own"), locked("newest")
    older = {n: (str(lock[n]), str(newest.get(n))) for n in names if n not in newest or newest[n] < lock[n]}
    assert not older, f"{older}: run make test-newest"


def test_lock_has_the_chosen_versions() -> None:
    lock = locked("own")
    for name, line in constraints(environments.SUPPORT / "constraints.txt").items():
        if line.marker is None or line.marker.evaluate():
            assert line.specifier.contains(lock[name]), f"{name}: run {environments.__file__} lock own"


def test_upper_limits_were_tested() -> None:
    """pip may bring no later minor version of a package than one that the tests ran with."""
    tested: dict[str, Version] = {}
    newest = ["newest"] if environments.lock_file("newest").exists() else []  # of a passing make test-newest
    for name in [*environments.FOLDERS, *newest]:
        for package, version in locked(name).items():
            tested[package] = max(version, tested.get(package, version))
    project = environments.tomllib.loads((environments.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(x for e, xs in extras.items() if e not in ("dev", "docs") for x in xs),
    ]
    untested = []
    for line in map(Requirement, lines):
        name = canonicalize_name(line.name)
        if name in ON_GPUS | {"fastkernels"} or not any(s.operator == "<" for s in line.specifier):
            continue
        major, minor = tested[name].release[:2]
        if line.specifier.contains(f"{major}.{minor + 1}") or line.specifier.contains(f"{major + 1}.0"):
            untested.append(f"{line}: {tested[name]} was tested")
    assert not untested, "\n".join(untested)


@pytest.mark.parametrize("arguments", [["nowhere"], ["lock", "newest"], ["record", "own"]])
def test_unknown_environment_names_the_known(arguments: list[str]) -> None:
    command = [sys.executable, environments.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "known: " in done.stderr and "Traceback" not in done.stderr


def test_two_checkouts_fill_the_cache_in_turn(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filling, twice, go_on = threading.Event(), threading.Event(), threading.Event()

    def fill(name: str, folder: Path) -> None:
        (twice if filling.is_set() else filling).set()
        folder.mkdir()
        go_on.wait(20)

    monkeypatch.setenv("FASTKERNELS_CACHE", str(project / "cache"))
    monkeypatch.setattr(environments, "fill", fill)
    monkeypatch.setattr(environments, "link", lambda cached, folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(environments, "install_ours", lambda name, folder: None)
    checkouts = [threading.Thread(target=environments.make, args=("own",)) for _ in range(2)]
    checkouts[0].start()
    assert filling.wait(20)
    checkouts[1].start()
    second = twice.wait(0.5)
    go_on.set()
    for checkout in checkouts:
        checkout.join()
    assert not second and not twice.is_set()
