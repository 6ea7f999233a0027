"""Make the three virtual environments of the tests and the demo: ours, vLLM's and SGLang's (their pins conflict).

`python tests/support/environments.py own vllm sglang` makes .venv, .venv-vllm and .venv-sglang in the root folder.
Packages from the registry are installed once into a cache, keyed by a hash of their requirements, and hard-linked
from there. FastKernels and the packages under tests/support/cpu_hosts are installed into the copy, and again after
each change of pyproject.toml (its entry points) or of those packages.

The versions are those of tests/support/locks. `lock own vllm sglang` resolves the requirements again and rewrites the
locks. `newest` makes .venv-newest, a copy of .venv with the newest versions that pyproject.toml allows, and
`record newest` writes them to locks/newest.txt after its tests passed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDERS = {"own": ".venv", "vllm": ".venv-vllm", "sglang": ".venv-sglang"}
NEWEST = ".venv-newest"
# on disk, and how long the installation takes on two cores
SIZES = {"own": "2.5 GB in 2 minutes", "vllm": "3.4 GB in 2 minutes", "sglang": "2.5 GB in 2 minutes"}
HELD = ("torch==", "torchvision==")  # CPU builds of newer ones are not in every registry
PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # requires-python
RECIPE = 2  # raise it when `fill` changes
GPU_HOSTS = {"vllm": ["vllm==0.33.0"], "sglang": ["sglang==0.5.23"]}
# folders of packages that hosts need on a machine without a GPU; torchvision's wheel is a CUDA build
CPU_PACKAGES = {"own": ["torchvision"], "vllm": ["vllm", "torchvision"], "sglang": ["sglang", "torchvision"]}


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def cache_root() -> Path:
    base = os.environ.get("FASTKERNELS_CACHE")
    return (
        Path(base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastkernels")
        / "venvs"
    )


def lock_file(name: str) -> Path:
    return SUPPORT / "locks" / f"{name}.txt"


def requirements(name: str) -> bytes:
    """The text that decides the packages from the registry; other settings of pyproject.toml do not."""
    if name == "own":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [project[k] for k in ("requires-python", "dependencies", "optional-dependencies")]
        return json.dumps(wanted).encode() + lock_file(name).read_bytes()
    if has_gpu():
        return b""
    return (SUPPORT / "cpu_hosts" / name / "requirements.txt").read_bytes() + lock_file(name).read_bytes()


def cpu_packages(name: str) -> list[Path]:
    return [] if has_gpu() else [SUPPORT / "cpu_hosts" / package for package in CPU_PACKAGES[name]]


def key(name: str) -> str:
    """The name of an environment's folder in the cache."""
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {has_gpu()} {GPU_HOSTS}".encode())
    digest.update(requirements(name))
    return digest.hexdigest()[:12]


def installed_sources(name: str) -> str:
    """A hash of the files that `install_ours` reads: our pyproject.toml and a host's CPU packages."""
    there = [f for folder in cpu_packages(name) for f in sorted(folder.rglob("*")) if f.is_file()]
    digest = hashlib.sha256()
    for file in [ROOT / "pyproject.toml", *there]:
        if not {"build", "__pycache__"} & set(file.parts) and ".egg-info" not in str(file):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run(*command: object) -> None:
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}  # setuptools warns of each editable installation
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr, env=quiet)


def pip(python: Path, *arguments: object) -> None:
    run(python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments)


def fill(name: str, folder: Path, locked: bool = True) -> None:
    """Install what the registry delivers: the versions of the lock, or those that the requirements resolve to."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip(python, "install", "-U", "pip", "setuptools>=77", "wheel")
    lock = ("-c", lock_file(name)) if locked else ()
    if name == "own":
        versions = lock or ("-c", SUPPORT / "constraints.txt")
        pip(python, "install", *versions, f"{ROOT}[dev]")
        # its dependency FlashInfer is for GPUs only; the others are here
        pip(python, "install", "--no-deps", *versions, "flashinfer-bench")
        pip(python, "uninstall", "-y", "fastkernels")
    elif has_gpu():
        pip(python, "install", "pytest", *GPU_HOSTS[name])
    else:
        fill_cpu_host(name, python, lock)


def fill_cpu_host(name: str, python: Path, lock: Sequence[object]) -> None:
    pip(python, "install", "pytest", *lock, "-r", SUPPORT / "cpu_hosts" / name / "requirements.txt")
    if name == "vllm":  # their CUDA builds do not import with a CPU torch
        pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    if name == "sglang":
        pip(python, "install", "--no-deps", "sglang==0.5.23", "torchvision==0.28.0")


# Run by the environment's own Python: the packages as pip constraints, without local versions such as +cpu. A package
# that does not support all our versions of Python is constrained only on those that it supports.
_CONSTRAINTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name
ours, lines = json.loads(sys.argv[1]), set()
for found in importlib.metadata.distributions():
    name = canonicalize_name(found.metadata["Name"])
    if name in ("pip", "setuptools", "wheel", "fastkernels") or name.startswith("cpu-host-"):
        continue
    supported = SpecifierSet(found.metadata["Requires-Python"] or "")
    pythons = [python for python in ours if supported.contains(python + ".99")]
    marker = "" if pythons == ours else f"; python_version >= '{pythons[0]}'"
    lines.add(name + "==" + found.version.partition("+")[0] + marker)
print(chr(10).join(sorted(lines)))
"""


def write_lock(name: str, python: Path, heading: str) -> None:
    """Write the packages of an environment as pip constraints."""
    command = [python, "-c", _CONSTRAINTS, json.dumps(PYTHONS)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lock_file(name).write_text(f"# {heading}, with Python {platform.python_version()}\n{lines}")


def lock(name: str) -> None:
    """Resolve an environment's requirements again and write its lock."""
    with tempfile.TemporaryDirectory(prefix="fastkernels-lock-") as folder:
        fill(name, Path(folder) / "venv", locked=False)
        python = Path(folder) / "venv" / "bin" / "python"
        write_lock(name, python, f"Made by tests/support/environments.py lock {name}")


def make_newest() -> None:
    """Make .venv-newest: a copy of .venv with the newest versions that pyproject.toml allows, but the same torch."""
    make("own")
    folder, cached = ROOT / NEWEST, cache_root() / f"own-{key('own')}"
    link(cached, folder)
    python = folder / "bin" / "python"
    held = [line for line in lock_file("own").read_text().splitlines() if line.startswith(HELD)]
    newer = ("install", "-U", "--upgrade-strategy", "eager")
    pip(python, *newer, *held, f"{ROOT}[dev]")
    install_ours("own", folder)


def link(cached: Path, folder: Path) -> None:
    """Copy a cached environment, with hard links where possible, and correct the paths in its scripts."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(cached, folder, symlinks=True, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(cached, folder, symlinks=True)
    for script in (folder / "bin").iterdir():
        text = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        if str(cached).encode() in text:
            mode = script.stat().st_mode
            script.unlink()  # the cached file shares the inode: never write into it
            script.write_bytes(text.replace(str(cached).encode(), str(folder).encode()))
            script.chmod(mode)


def install_ours(name: str, folder: Path) -> None:
    python = folder / "bin" / "python"
    packages = cpu_packages(name)
    if name == "vllm" and packages:
        run(python, packages[0] / "make_shim.py")
        pip(python, "install", "--no-deps", "torchvision==0.28.0")  # videos of transformers' processors
    for project in [("-e", ROOT), *((package,) for package in packages)]:
        pip(python, "install", "--no-deps", "--no-build-isolation", *project)
    # setuptools would reuse old files from the first; the second hides the entry points that were installed
    for folder in (*(SUPPORT / "cpu_hosts").glob("*/build"), ROOT / "fastkernels.egg-info"):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def alone(cached: Path) -> Iterator[None]:
    """Hold the lock of a cached environment: two checkouts must not fill it at once."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with cached.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{cached.name}: waiting for another process that installs it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(name: str) -> None:
    """Make or update an environment. Its stamp names the cached packages and the version of our own."""
    folder, cached = ROOT / FOLDERS[name], cache_root() / f"{name}-{key(name)}"
    stamp, ours = folder / ".fastkernels-key", installed_sources(name)
    packages, _, installed = stamp.read_text().partition(" ") if stamp.is_file() else ("", "", "")
    if (packages, installed) == (cached.name, ours):
        return
    start = time.monotonic()
    with alone(cached):
        if not (cached / ".complete").exists():
            size = "its packages" if has_gpu() else SIZES[name]
            print(f"{folder.name}: installing {size}, once", file=sys.stderr, flush=True)
            shutil.rmtree(cached, ignore_errors=True)
            fill(name, cached)
            (cached / ".complete").touch()
    if packages != cached.name:
        link(cached, folder)
    install_ours(name, folder)
    stamp.write_text(f"{cached.name} {ours}")
    print(f"{folder.name}: ready after {time.monotonic() - start:.0f} s", file=sys.stderr)


def main(arguments: list[str]) -> None:
    command = arguments[0] if arguments and arguments[0] in ("lock", "record") else ""
    names = arguments[bool(command) :] or list(FOLDERS)
    known = {"lock": list(FOLDERS), "record": ["newest"]}.get(command, [*FOLDERS, "newest"])
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown environment {unknown[0]!r}, known: {', '.join(known)}")
    for name in names:
        if command == "lock":
            lock(name)
        elif command == "record":
            python = ROOT / NEWEST / "bin" / "python"
            write_lock(name, python, "The newest versions that passed `make test-newest`")
        elif name == "newest":
            make_newest()
        else:
            make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
