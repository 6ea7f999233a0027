"""The entry of a caged child in tests: runs the source in config["code"], which may `say(...)` JSON lines."""

from __future__ import annotations

import json
import socket
from typing import Any


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    def say(*values: Any) -> None:
        for value in values:
            channel.sendall(json.dumps(value).encode() + b"\n")

    exec(
        config["code"],
        {"say": say, "channel": channel, "config": config, "fds": fds, "__name__": "candidate"},
    )
