"""HTTP/1.1 for loads of many streams: what a client costs must not be what is measured.

httpx takes 110 us of CPU a chunk, and with n connections some n^3 / 2 looks at one another before n requests are sent:
seconds, at 256. This takes some 5 us and sends a request in one write. It speaks to a server on this machine, and reads
bodies of a known length, chunked ones, and those that end with the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

OnBody = Callable[[bytes], None]
MAX_HEAD = 65536  # bytes of a status line and headers


class WireError(Exception):
    """The connection failed, or what came is not HTTP/1.1."""


class _Closed(WireError):
    """By the server, or on the way there."""


@dataclass
class Reply:
    """body: empty where it went to on_body."""

    status: int
    body: bytes = b""


class Wire:
    """Connections to one server, http only, as many as there are requests at once; they are used again.

    timeout_s: seconds without a byte of an answer. Raises ValueError for a URL of another kind.
    """

    def __init__(self, url: str, timeout_s: float):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server: http://HOST:PORT is needed")
        self._host, self._port, self._prefix = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self._name, self._timeout = parts.netloc.encode(), timeout_s
        self._free: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None, kind: str = "application/json"
    ) -> Reply:  # fmt: skip
        """on_body: gets each part of the body of an answer with status 200 as it comes. Raises WireError."""
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\n" % (
            method.encode(),
            (self._prefix + path).encode(),
            self._name,
        )
        if body or method == "POST":
            head += b"content-type: %b\r\ncontent-length: %d\r\n" % (kind.encode(), len(body))
        message = head + b"\r\n" + body
        while True:
            connection, used = await self._connection()
            try:
                return await connection.ask(message, on_body, self._timeout)
            except _Closed:
                # The server may have closed it while it was free.
                if not used or connection.received:
                    raise
            finally:
                if connection.reusable:
                    self._free.append(connection)
                else:
                    connection.close()
                    self._open.discard(connection)

    async def connect(self, count: int) -> None:
        """So many free connections."""
        new = await asyncio.gather(*(self._new() for _ in range(count - len(self._free))))
        self._free += new

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._free.clear()

    async def _connection(self) -> tuple[_Connection, bool]:
        """(one that is free, whether it has been used)."""
        while self._free:
            connection = self._free.pop()
            if connection.reusable:
                return connection, True
            self._open.discard(connection)
        return await self._new(), False

    async def _new(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port
            )
        except OSError as error:
            raise WireError(f"{type(error).__name__}: {error}") from error
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time. `received`: bytes of the answer to the last one."""

    def __init__(self) -> None:
        self.received = 0
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._done: asyncio.Future[Reply] | None = None

    @property
    def reusable(self) -> bool:
        return self._transport is not None and (self._done is None or self._done.done()) and self._keep

    async def ask(self, message: bytes, on_body: OnBody | None, timeout_s: float) -> Reply:
        assert self._transport is not None
        self.received, self._keep, self._head_read = 0, False, False
        self._on_body, self._parts = on_body, list[bytes]()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        while not self._done.done():
            seen = self.received
            await asyncio.wait({self._done}, timeout=timeout_s)
            if not self._done.done() and self.received == seen:
                raise WireError(f"no byte of an answer came for {timeout_s:g} seconds")
        return self._done.result()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    _keep = True  # a connection that was opened ahead

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._keep = None, False
        if self._done is None or self._done.done():
            return
        if self._head_read and self._left is None and not self._chunked:
            self._end()  # its end is the body's
        else:
            self._fail(_Closed("the server closed the connection" if error is None else str(error)))

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self._done is None or self._done.done():
            return
        self._buffer += data
        try:
            if self._head_read or self._read_head():
                self._read_chunks() if self._chunked else self._read_body()
        except ValueError as error:
            self._fail(WireError(f"what came is not HTTP/1.1: {error}"))
            self.close()

    def _read_head(self) -> bool:
        """Whether all of it is there."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ValueError(f"headers of more than {MAX_HEAD} bytes")
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        version, status, *_ = [*first.split(b" ", 2), b""]
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"it begins with {first[:80]!r}")
        headers = {
            k.strip().lower(): v.strip().lower() for k, _, v in (line.partition(b":") for line in lines)
        }
        self._status = int(status)
        self._keep = headers.get(b"connection") != b"close" and version == b"HTTP/1.1"
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length")
        self._left = int(length) if length is not None else None
        del self._buffer[: end + 4]
        self._head_read = True
        return True

    def _read_chunks(self) -> None:
        buffer, at = self._buffer, 0
        while (end := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:end].partition(b";")[0], 16)
            if size == 0:
                if buffer.find(b"\r\n\r\n", end) < 0:  # after trailers, if there are some
                    break
                self._end()
                return
            if len(buffer) < end + size + 4:
                break
            self._part(bytes(buffer[end + 2 : end + 2 + size]))
            at = end + size + 4
        del buffer[:at]

    def _read_body(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(data)
        if data:
            self._part(data)
        if self._left is not None and self._left <= 0:
            self._end()

    def _part(self, data: bytes) -> None:
        if self._on_body is not None and self._status == 200:
            self._on_body(data)
        else:
            self._parts.append(data)

    def _end(self) -> None:
        self._buffer.clear()
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._status, b"".join(self._parts)))

    def _fail(self, error: WireError) -> None:
        self._keep = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
