"""The protocol of judge and runner: length-prefixed JSON over a private socket; each reply carries its nonce."""

from __future__ import annotations

import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE = 32 << 20
MAX_FDS = 4  # file descriptors of a command
_LENGTH = struct.Struct("!I")


class ChannelClosed(ConnectionError):
    """The other end is closed."""


class ChannelTimeout(TimeoutError):
    """No complete message arrived in time."""


class ChannelGarbage(ValueError):
    """The received data is no message, or no reply to the command."""


class Channel:
    """One end: the judge sends a `command` and reads bytes, which `messages` checks; the runner receives and sends.

    spin_s  seconds of busy waiting for a message, for timed work on machines with enough cores
    fds     file descriptors that came with the last command that had any
    """

    def __init__(self, sock: socket.socket):
        self.sock, self.spin_s, self.fds = sock, 0.0, list[int]()
        sock.setblocking(False)

    def send(self, message: dict[str, Any], timeout: float = 60.0, fds: Sequence[int] = ()) -> None:
        """Raises ChannelClosed, ChannelTimeout."""
        body = json.dumps(message).encode()
        data, end = memoryview(_LENGTH.pack(len(body)) + body), time.monotonic() + timeout
        while data:
            try:
                data = data[socket.send_fds(self.sock, [data], fds) if fds else self.sock.send(data) :]
                fds = ()
            except BlockingIOError:
                if not select.select([], [self.sock], [], max(end - time.monotonic(), 0))[1]:
                    raise ChannelTimeout("the other side does not read") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next command, read by a runner, which trusts the judge. Raises ChannelClosed, ChannelTimeout."""
        return json.loads(self.receive_bytes(timeout, fds=True))

    def receive_bytes(
        self, timeout: float | None = None, limit: int = MAX_MESSAGE, fds: bool = False
    ) -> bytes:
        """The next message, unread. Raises ChannelClosed, ChannelTimeout, and ChannelGarbage above `limit` bytes."""
        end = None if timeout is None else time.monotonic() + timeout
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, end, fds))
        if size > limit:
            raise ChannelGarbage(f"a message of {size} bytes")
        return self._exactly(size, end)

    def readable(self, seconds: float = 0.0) -> bool:
        """Whether there is something to receive within so many seconds, the end included."""
        return bool(select.select([self.sock], [], [], seconds)[0])

    def command(self, do: str, timeout: float, fds: Sequence[int] = (), **arguments: Any) -> str:
        """Send a command. Returns its nonce, which the answer must carry."""
        nonce = secrets.token_hex(8)
        self.send({"do": do, "nonce": nonce, **arguments}, timeout, fds)
        return nonce

    def _exactly(self, size: int, end: float | None, fds: bool = False) -> bytes:
        parts, spin = [], time.monotonic() + self.spin_s
        while size:
            try:
                if fds:
                    part, came, _, _ = socket.recv_fds(self.sock, size, MAX_FDS)
                    self.fds = came or self.fds
                else:  # those of a candidate are closed unread
                    part = self.sock.recv(size)
            except BlockingIOError:
                if time.monotonic() < spin:
                    continue
                left = None if end is None else max(end - time.monotonic(), 0)
                if not select.select([self.sock], [], [], left)[0]:
                    raise ChannelTimeout("no answer") from None
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not part:
                raise ChannelClosed("the other side closed the channel")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
