"""Ports for servers that take a number."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below the range from which Linux takes ports for connections and for port 0, so that no other process gets the port
# between this call and the start of the server.
PORTS = range(18_000, 32_000)


def free_port() -> int:
    """A free port of 127.0.0.1."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as s, suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
            return port
