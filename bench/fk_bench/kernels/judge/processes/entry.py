"""Where a caged process begins: from a socket and descriptors to the runner."""

from __future__ import annotations

import socket
from typing import Any

from fk_bench.kernels.judge.processes import runner
from fk_bench.kernels.judge.processes.protocol import Channel


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    """The runner, which tells the judge first what its cage is made of."""
    runner.main(Channel(channel), fds, config["cage"])
