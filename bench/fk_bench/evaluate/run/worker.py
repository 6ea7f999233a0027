"""A host in a caged process of its own, driven by messages: {"do": name, ...} gives an answer or {"error": ...}.

The process that sends the messages has the clock and counts tokens; from here it believes outputs and failures alone.
"""

from __future__ import annotations

import faulthandler
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fk_integrations.patching import compilations

from fastkernels.core.compile_cache import requested_folder
from fk_bench.evaluate.reasons import described
from fk_bench.kernels.judge.processes import forkserver


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    """Answer messages until the other end is closed."""
    for file in config["compiled"]:  # visible at their own paths, read-only
        kept = requested_folder(Path(file).parent.name)
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, kept)
    compilations.watch()
    faulthandler.register(signal.SIGUSR1, chain=False)  # at a limit of time: see Side
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
        except (
            BaseException
        ) as error:  # whatever a candidate, a compiler or a host raises, sys.exit() included
            answer = {"error": described(error)}
        forkserver.send(channel, answer)
