"""The three virtual environments of the tests and the demo: ours, vLLM's and SGLang's (they pin different versions).

`python tests/support/environments.py own vllm sglang` makes .venv, .venv-vllm and .venv-sglang beside the Makefile.
What the registry delivers is installed once into the cache, under the hash of its requirements, and hard-linked
from there; FastKernels itself and the helpers of tests/support/cpu_hosts are installed into the copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDERS = {"own": ".venv", "vllm": ".venv-vllm", "sglang": ".venv-sglang"}
RECIPE = 1  # raise it when `fill` changes
GPU_HOSTS = {"vllm": ["vllm==0.33.0"], "sglang": ["sglang==0.5.23"]}


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def cache_root() -> Path:
    base = os.environ.get("FASTKERNELS_CACHE")
    return (
        Path(base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastkernels")
        / "venvs"
    )


def inputs(name: str) -> list[Path]:
    """The files that decide what is installed from the registry."""
    if name == "own":
        return [ROOT / "pyproject.toml", SUPPORT / "constraints.txt"]
    return [] if has_gpu() else [SUPPORT / "cpu_hosts" / name / "requirements.txt"]


def key(name: str) -> str:
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {has_gpu()} {GPU_HOSTS}".encode())
    for file in inputs(name):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def run(*command: object) -> None:
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr)


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
    if name == "vllm":  # its CUDA builds of these break the import beside a CPU torch
        pip(python, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    if name == "sglang":
        pip(python, "install", "--no-deps", "sglang==0.5.23", "torchvision==0.28.0")


def link(cached: Path, folder: Path) -> None:
    """A copy of the cached environment, by hard links where the file system can, that knows its own path."""
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
    projects = [("-e", ROOT)]
    if name != "own" and not has_gpu():
        projects.append((SUPPORT / "cpu_hosts" / name,))
        if name == "vllm":
            run(python, SUPPORT / "cpu_hosts" / name / "make_shim.py")
    for project in projects:
        pip(python, "install", "--no-deps", "--no-build-isolation", *project)


def make(name: str) -> None:
    folder, cached = ROOT / FOLDERS[name], cache_root() / f"{name}-{key(name)}"
    stamp = folder / ".fastkernels-key"
    if stamp.is_file() and stamp.read_text() == cached.name:
        return
    start = time.monotonic()
    if not (cached / ".complete").exists():
        shutil.rmtree(cached, ignore_errors=True)
        cached.parent.mkdir(parents=True, exist_ok=True)
        fill(name, cached)
        (cached / ".complete").touch()
    link(cached, folder)
    install_ours(name, folder)
    stamp.write_text(cached.name)
    print(f"{folder.name}: ready after {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    for environment in sys.argv[1:] or FOLDERS:
        if environment not in FOLDERS:
            raise SystemExit(f"unknown environment {environment!r}, known: {', '.join(FOLDERS)}")
        make(environment)
