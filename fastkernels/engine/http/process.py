"""The server process: socket, signals and shutdown."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from typing import Any

import uvicorn

from fastkernels.engine.execution.forward.startup import keep_objects
from fastkernels.engine.http.connection import limited
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.server import Server
from fastkernels.engine.options.config import EngineConfig

log = logging.getLogger("fastkernels")
LAST_WORDS = 2.0  # seconds to send answers after their requests have been ended


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket, before the model is loaded. Raises OSError with the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Without it, the first token on a kept-alive connection waits for the client's
    # delayed acknowledgement of the headers: 40 ms on Linux.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        flag = (
            "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
        )
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from error
    return sock


def serve(config: EngineConfig, sock: socket.socket, server_config: ServerConfig | None = None) -> int:
    """Serve until a signal or until the engine ends. Returns the exit status: 1 if the engine ended, otherwise 0.

    After SIGTERM, new requests get 503, and running ones have drain_timeout seconds before they get an error. After a
    second signal or SIGINT, they get the error at once.
    """
    server = Server(config, server_config)
    keep_objects()
    host, port = sock.getsockname()[:2]
    if not server.config.api_key and not _loopback(host):
        log.warning("%s accepts requests from the network without an API key: set --api-key", host)
    process = Process(server)
    address = f"[{host}]" if ":" in host else host
    log.info("serving %s at http://%s:%d/v1", server.model_name, address, port)
    process.run(sockets=[sock])
    return 1 if server.llm.dead is not None else 0


class Process(uvicorn.Server):
    """uvicorn's server with a graceful shutdown. It handles signals itself and does not raise them again."""

    def __init__(self, server: Server):
        config = server.config
        options = uvicorn.Config(
            server.app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(LAST_WORDS),
            timeout_keep_alive=config.timeout_keep_alive, server_header=False, lifespan="off",
            http=limited(config.header_timeout),
        )  # fmt: skip
        super().__init__(options)
        self.server = server
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self.server.close(timeout=1.0 if self.force_exit else 10.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.server.llm.on_death = self._end
        await super().startup(sockets)
        if self.server.llm.dead is not None:
            self._end()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handle a signal, in the main thread."""
        gently = sig == signal.SIGTERM and not self.server.draining
        self.force_exit = self.should_exit
        self.server.draining = True
        if self._loop is None:  # it has not started yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining if gently else self._end)

    def _end(self) -> None:
        self.server.llm.fail_all("the server is shutting down")
        self.should_exit = True

    def _start_draining(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._wait_for_requests())

    async def _wait_for_requests(self) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self.server.config.drain_timeout
        log.info(
            "SIGTERM: %d requests have %g seconds", self.server.app.active, self.server.config.drain_timeout
        )
        while self.server.app.active and clock() < until and not self.should_exit:
            await asyncio.sleep(0.05)
        self._end()


def _loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
