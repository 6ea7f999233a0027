"""Streams and complete answers that stop working when the client disconnects."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.stream import OutputStream

log = logging.getLogger("fastkernels")
T = TypeVar("T")
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """A stream of server-sent events, or of `media_type`.

    answer: an Answer, or an object with its opening, events, closing and failed.

    Outputs for a slow client are joined. A write that takes longer than `stall_timeout` seconds aborts the requests and
    closes the connection. So does an error for which answer.failed returns None.
    """

    def __init__(self, answer: Any, outputs: OutputStream, stall_timeout: float, media_type: str = ""):
        super().__init__(media_type=media_type or "text/event-stream")
        self._head = [(HEADERS[0][0], media_type.encode()), *HEADERS[1:]] if media_type else HEADERS
        self.answer, self.outputs, self.stall_timeout = answer, outputs, stall_timeout
        self._writing_since: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            while not sending.done() and not gone.done() and not self._stalled():
                await asyncio.wait(
                    {sending, gone}, timeout=self.stall_timeout / 4, return_when=asyncio.FIRST_COMPLETED
                )
            if self._stalled() and not sending.done():
                log.warning("a client read nothing for %g seconds: closing its stream", self.stall_timeout)
        finally:
            self.outputs.close()
            await cancel(sending, gone)
        # The server closes the connection of an incomplete stream.

    async def _events(self) -> bytes:
        made: Any = self.answer.events(await self.outputs.get())
        return await made if inspect.isawaitable(made) else made

    def _stalled(self) -> bool:
        since = self._writing_since
        return since is not None and asyncio.get_running_loop().time() - since > self.stall_timeout

    async def _send_all(self, send: Any) -> None:
        clock = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        try:
            body = self.answer.opening()
            while body or not self.outputs.finished:
                body = body or await self._events()
                self._writing_since = clock()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._writing_since, body = None, b""
            last = self.answer.closing()
        except Exception as error:  # the status has been sent: the error is an event
            if not isinstance(error, EngineError):
                log.exception("a stream ended with an internal error")
            status = 503 if getattr(error, "stopped", False) else 500
            last = self.answer.failed(str(error), status)
            if last is None:
                return
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def unless_gone(raw: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the client disconnects first, which cancels it."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnect(raw.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel(task, gone)


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
