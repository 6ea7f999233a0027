"""Make the three virtual environments of the tests and the demo: ours, vLLM's and SGLang's (their pins conflict).

`python tests/support/environments.py own vllm sglang` makes .venv, .venv-vllm and .venv-sglang in the root folder.
Packages from the registry are installed once into a cache, keyed by a hash of their requirements, and hard-linked
from there. FastKernels and the packages under tests/support/cpu_hosts are installed into the copy, and again after
each change of pyproject.toml (its entry points) or of those packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDERS = {"own": ".venv", "vllm": ".venv-vllm", "sglang": ".venv-sglang"}
RECIPE = 1  # raise it when `fill` changes
GPU_HOSTS = {"vllm": ["vllm==0.33.0"], "sglang": ["sglang==0.5.23"]}
# folders of packages that hosts need on a machine without a GPU; torchvision's wheel is a CUDA build
CPU_PACKAGES = {"own": ["torchvision"], "vllm": ["vllm"], "sglang": ["sglang", "torchvision"]}


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def cache_root() -> Path:
    base = os.environ.get("FASTKERNELS_CACHE")
    return (
        Path(base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastkernels")
        / "venvs"
    )


def requirements(name: str) -> bytes:
    """The text that decides the packages from the registry; other settings of pyproject.toml do not."""
    if name == "own":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [project[k] for k in ("requires-python", "dependencies", "optional-dependencies")]
        return json.dumps(wanted).encode() + (SUPPORT / "constraints.txt").read_bytes()
    return b"" if has_gpu() else (SUPPORT / "cpu_hosts" / name / "requirements.txt").read_bytes()


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


def fill(name: str, folder: Path) -> None:
    """Install what the registry delivers."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip(python, "install", "-U", "pip", "setuptools>=77", "wheel")
    if name == "own":
        pip(python, "install", "-c", SUPPORT / "constraints.txt", f"{ROOT}[dev]")
        pip(python, "uninstall", "-y", "fastkernels")
    elif has_gpu():
        pip(python, "install", "pytest", *GPU_HOSTS[name])
    else:
        fill_cpu_host(name, python)


def fill_cpu_host(name: str, python: Path) -> None:
    pip(python, "install", "pytest", "-r", SUPPORT / "cpu_hosts" / name / "requirements.txt")
    if name == "vllm":  # their CUDA builds do not import with a CPU torch
        pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    if name == "sglang":
        pip(python, "install", "--no-deps", "sglang==0.5.23", "torchvision==0.28.0")


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
    for project in [("-e", ROOT), *((package,) for package in packages)]:
        pip(python, "install", "--no-deps", "--no-build-isolation", *project)
    for folder in (SUPPORT / "cpu_hosts").glob("*/build"):  # setuptools would reuse old files from there
        shutil.rmtree(folder, ignore_errors=True)


def make(name: str) -> None:
    """Make or update an environment. Its stamp names the cached packages and the version of our own."""
    folder, cached = ROOT / FOLDERS[name], cache_root() / f"{name}-{key(name)}"
    stamp, ours = folder / ".fastkernels-key", installed_sources(name)
    packages, _, installed = stamp.read_text().partition(" ") if stamp.is_file() else ("", "", "")
    if (packages, installed) == (cached.name, ours):
        return
    start = time.monotonic()
    if not (cached / ".complete").exists():
        shutil.rmtree(cached, ignore_errors=True)
        cached.parent.mkdir(parents=True, exist_ok=True)
        fill(name, cached)
        (cached / ".complete").touch()
    if packages != cached.name:
        link(cached, folder)
    install_ours(name, folder)
    stamp.write_text(f"{cached.name} {ours}")
    print(f"{folder.name}: ready after {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    for environment in sys.argv[1:] or FOLDERS:
        if environment not in FOLDERS:
            raise SystemExit(f"unknown environment {environment!r}, known: {', '.join(FOLDERS)}")
        make(environment)
