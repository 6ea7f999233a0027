"""Compile C++ kernels for the CPU with the user's compiler, cache the libraries in a folder, and load them.

A source uses only PyTorch's thread pool (ATen/Parallel.h), so it compiles in seconds. Kernels are called through
ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import compile_cache
from fastkernels.overrides.kit import cpu

log = logging.getLogger("fastkernels")
FLAGS = (
    "-O3", "-std=c++20", "-fopenmp", "-fPIC", "-shared", "-ffp-contract=fast",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
# The first that the compiler and its assembler know. Old ones for ARM have only -mcpu=native; an assembler older than
# its compiler rejects the instructions of a newer CPU.
TARGETS = ("-march=native", "-mcpu=native", "")
HEADERS = Path(__file__).parent / "csrc"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of dtypes in calls of kernels
SECONDS = 300  # that a compiler may take


def compiler() -> str | None:
    """The path of the C++ compiler: CXX, else the first of c++, g++ and clang++ on the PATH; None without one."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else ("c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


_kept: dict[str, ctypes.CDLL] = {}  # by the file's name


def load_kept() -> list[str]:
    """Load every library that the folder keeps, and return the files' names.

    Forked processes that cannot read the folder then have them, too, instead of compiling their own.
    """
    for file in compile_cache.requested_folder("cpp").glob("*.so"):
        with suppress(OSError):
            _kept[file.name] = ctypes.CDLL(str(file))
    return sorted(_kept)


@cache
def library(source: Path, *flags: str) -> ctypes.CDLL | str:
    """The loaded library of a source, or why there is none, which is logged once.

    The file's name covers the source, the flags, the compiler, PyTorch and the CPU. Processes may run this
    concurrently: each writes a file of its own and renames it.
    """
    try:
        return _load(source, (*FLAGS, *flags))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = f"{source.name} cannot be compiled: {said.strip()[-2000:]}"
    log.warning("%s; slower code of PyTorch runs instead. CXX names a C++ compiler", reason)
    return reason


def function(library: ctypes.CDLL | str, name: str, *types: Any, returns: Any = None) -> Callable[..., Any]:
    """A function of a loaded library with these types. Raises RuntimeError where there is none."""
    if isinstance(library, str):
        raise RuntimeError(library)
    found = getattr(library, name)
    found.argtypes, found.restype = types, returns
    return found


def _load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    path = compiler()
    if path is None:
        raise FileNotFoundError(f"no C++ compiler was found ({os.environ.get('CXX') or 'c++, g++, clang++'})")
    version = subprocess.run(
        [path, "--version"], capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout
    headers = (header.read_text() for header in sorted(HEADERS.glob("*.hpp")))
    # The CPU, since a folder may be shared by different machines
    parts = (
        source.read_text(), *headers, *TARGETS, *flags, path, version, torch.__version__,
        platform.machine(), cpu.model(), *sorted(cpu.flags()),
    )  # fmt: skip
    name = f"{source.stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"
    if name in _kept:
        return _kept[name]
    kept = compile_cache.requested_folder("cpp") / name
    if kept.is_file():
        return ctypes.CDLL(str(kept))
    folder = compile_cache.folder("cpp")
    if folder is not None and (folder / name).is_file():
        return ctypes.CDLL(str(folder / name))
    with tempfile.TemporaryDirectory(prefix=".cpp-", dir=folder) as scratch:
        made = Path(scratch) / name
        start = time.monotonic()
        log.info("compiling %s with %s", source.name, path)
        _compile(path, [*flags, "-I", str(HEADERS), str(source), "-o", str(made), *_torch_options()])
        log.info("compiled %s in %.1f s", source.name, time.monotonic() - start)
        if folder is None:
            return ctypes.CDLL(str(made))  # stays mapped
        os.replace(made, folder / name)
    return ctypes.CDLL(str(folder / name))


def _compile(path: str, options: list[str]) -> None:
    """Run the compiler with the first of TARGETS that it accepts. Raises the error of the first."""
    failed = []
    for target in TARGETS:
        try:
            command = [path, *filter(None, [target]), *options]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
        except subprocess.CalledProcessError as error:
            failed.append(error)
            continue
        if failed:
            log.info(
                "%s rejects %s and compiles with %s", path, TARGETS[0], target or "its default instructions"
            )
        return
    raise failed[0]


def _torch_options() -> list[str]:
    """PyTorch's headers and libraries; its own OpenMP library, since a second one would have threads of its own."""
    root = Path(torch.__file__).parent
    openmp = [str(path) for path in sorted((root / "lib").glob("libgomp*.so*"))[:1]]
    links = ["-Wl,--as-needed", *openmp, "-lc10", "-ltorch_cpu"]
    return ["-I", str(root / "include"), "-L", str(root / "lib"), *links]
