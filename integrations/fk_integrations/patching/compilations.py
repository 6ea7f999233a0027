"""Compilations of a process: graphs of torch.compile, candidates' kernels by Triton, and compilers that it started."""

from __future__ import annotations

import os
import sys
from typing import Any

from fastkernels.core import candidate

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "cicc", "ninja")
_started: list[str] = []  # programs of COMPILERS, since `watch`
_watched: list[bool] = []


def watch() -> None:
    """Note the compilers that start from now on. No code of the process can end this."""
    if not _watched:
        _watched.append(True)
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        name = os.path.basename(str(args[0]))
        if name in COMPILERS:
            _started.append(name)


def count() -> int:
    """Compilations until now, those of compilers since `watch`, which the first call begins."""
    watch()
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
    return int(graphs) + len(_started) + _jit_compiled()


def _jit_compiled() -> int:
    """Kernels of candidates that Triton has compiled for new arguments."""
    runtime = sys.modules.get("triton.runtime.jit")
    if runtime is None:
        return 0
    return sum(sum(map(len, _caches(f))) for f in _jit_functions(runtime))


def _jit_functions(runtime: Any) -> list[Any]:
    found = {
        id(value): value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith(candidate.MODULES)
        for value in list(vars(module).values())
        if isinstance(value, runtime.JITFunction)
    }
    return list(found.values())


def _caches(function: Any) -> list[dict[Any, Any]]:
    caches = getattr(function, "device_caches", {})
    return [entry[0] for entry in caches.values() if entry and isinstance(entry[0], dict)]
