"""The entry of a caged process: from a socket and file descriptors to the runner."""

from __future__ import annotations

import socket
from typing import Any

from fk_bench.kernels.judge.processes import runner
from fk_bench.kernels.judge.processes.protocol import Channel


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    """Run the runner, which first reports its cage to the judge."""
    runner.main(Channel(channel), fds, config["cage"])
