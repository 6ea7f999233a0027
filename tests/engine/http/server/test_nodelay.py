"""The listening socket sends small chunks at once."""

from __future__ import annotations

import socket

from fastkernels.engine.http.process import bind


def test_accepted_connections_do_not_delay_tokens() -> None:
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
