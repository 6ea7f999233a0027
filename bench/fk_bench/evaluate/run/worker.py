"""A host in a caged process of its own, driven by messages: {"do": name, ...} gives an answer or {"error": ...}.

The process that sends the messages has the clock and counts tokens; from here it believes outputs and failures alone.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastkernels.core.compile_cache import requested_folder
from fk_bench.evaluate.reasons import described
from fk_bench.kernels.judge.processes import forkserver

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "cicc", "ninja")
_started: list[str] = []  # programs of COMPILERS, by an audit hook, which no code can remove


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        name = os.path.basename(str(args[0]))
        if name in COMPILERS:
            _started.append(name)


def compilations() -> int:
    """Compilations in this process until now: graphs of torch.compile, and compilers that were started."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
    return int(graphs) + len(_started) + _jit_compiled()


def _jit_compiled() -> int:
    """Kernels that Triton has compiled for new arguments."""
    runtime = sys.modules.get("triton.runtime.jit")
    if runtime is None:
        return 0
    return sum(sum(map(len, _caches(f))) for f in _jit_functions(runtime))


def _jit_functions(runtime: Any) -> list[Any]:
    found = {
        id(value): value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("fastkernels_candidate_")
        for value in list(vars(module).values())
        if isinstance(value, runtime.JITFunction)
    }
    return list(found.values())


def _caches(function: Any) -> list[dict[Any, Any]]:
    caches = getattr(function, "device_caches", {})
    return [entry[0] for entry in caches.values() if entry and isinstance(entry[0], dict)]


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    """Answer messages until the other end is closed."""
    for file in config["compiled"]:  # visible at their own paths, read-only
        kept = requested_folder(Path(file).parent.name)
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    sys.addaudithook(_audit)
    forkserver.send(channel, {"cage": config["cage"]})
    served: Any = None
    while True:
        try:
            message, _ = forkserver.receive(channel)
        except (EOFError, ConnectionError):
            return
        try:
            do = message.pop("do")
            if do == "open":
                from fk_bench.evaluate.run.hosts import open_host

                served = open_host(message)
                answer: dict[str, Any] = {}
            else:
                method: Callable[..., Any] = getattr(served, do)
                answer = method(**message) or {}
            answer["compilations"] = compilations()
        except (
            BaseException
        ) as error:  # whatever a candidate, a compiler or a host raises, sys.exit() included
            answer = {"error": described(error)}
        forkserver.send(channel, answer)
