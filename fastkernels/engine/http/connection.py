"""The time that a connection may take to send a request's headers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

Base: Any = AutoHTTPProtocol  # httptools' protocol if it is installed, otherwise h11's


class Connection(Base):
    """uvicorn's protocol with a limit on silent connections and half-sent headers, which uvicorn keeps open.

    The time counts from the connection, or from the first byte after a complete answer; more bytes do not extend it.
    Bodies have their own limit (gate.py), and idle connections after an answer have uvicorn's timeout_keep_alive.
    """

    header_timeout = 30.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the deadline while no request is complete; stop it once one is being answered."""
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._stop()
        elif self._deadline is None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self.header_timeout, self._expire)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()


def limited(seconds: float) -> type[Any]:
    """The protocol class with this limit."""
    return type("Connection", (Connection,), {"header_timeout": seconds})
