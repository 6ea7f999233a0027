"""Other nodes of an engine, as forks of the test's process; their ranks are forks of them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import time
from types import SimpleNamespace
from typing import Any

from support.serving.rank_forks import Fork

from fastkernels.engine.execution import ranks
from fastkernels.engine.execution.follow import follow
from fastkernels.engine.options.config import EngineConfig

NODE_0 = "127.0.0.2"  # Linux connects to it from 127.0.0.1, which is the address of node 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((NODE_0, 0))
        port: int = probe.getsockname()[1]
        return port


class Node:
    """A node that follows node 0. `said` is the error with which it ended, '' if there was none."""

    def __init__(self, config: EngineConfig):
        theirs, ours = os.pipe()
        self.pid, self._pipe = os.fork(), theirs
        if self.pid == 0:
            said = "it did not end in order"
            try:
                gc.freeze()  # the end of an earlier group would wait for threads that only the parent has
                ranks.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Fork})  # type: ignore[assignment]
                follow(config)
                said = ""
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                os.write(ours, said.encode())
                os._exit(0)
        os.close(ours)

    def said(self, seconds: float = 60.0) -> str:
        """Wait for its end."""
        until = time.monotonic() + seconds
        while not os.waitpid(self.pid, os.WNOHANG)[0]:
            assert time.monotonic() < until, "the node has not ended"
            time.sleep(0.02)
        with os.fdopen(self._pipe) as pipe:
            return pipe.read()

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def configs(model: Any, port: int, nnodes: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """The keyword arguments of each node's LLM."""
    common = {
        "device": "cpu", "dtype": "float32", "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64,
        "num_blocks": 40, "nnodes": nnodes, "master_addr": NODE_0, "master_port": port, "dist_timeout": 60.0,
    }  # fmt: skip
    return [{"model": str(model), **common, "node_rank": rank, **settings} for rank in range(nnodes)]
