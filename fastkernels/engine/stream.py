"""What the engine's thread has for one HTTP request, on its way to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastkernels.engine.scheduling.request import CompletionOutput, RequestOutput


class OutputStream:
    """Outputs of some requests, step by step. Used in one event loop.

    A reader that is slow gets what came in the meantime as one output, so that what is kept for it never exceeds its
    requests' text. delta: outputs have what is new (RequestOutputKind.DELTA), and are joined; else the last one counts.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None], delta: bool):
        self.loop = asyncio.get_running_loop()
        self.request_ids, self.delta = list(request_ids), delta
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self._index = {request_id: i for i, request_id in enumerate(self.request_ids)}
        self._unfinished = set(self.request_ids)
        self._pending: dict[int, RequestOutput] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._abort = abort

    @property
    def finished(self) -> bool:
        """All has been read. An error counts as something to read."""
        return not self._unfinished and not self._pending and self._error is None

    async def get(self) -> list[tuple[int, RequestOutput]]:
        """What is new, by the index of the request; waits for something. Raises what went wrong."""
        while not self._pending and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._pending:
            items, self._pending = list(self._pending.items()), {}
            return items
        assert self._error is not None
        raise self._error

    async def rest(self) -> list[tuple[int, RequestOutput]]:
        """All outputs to the end, as one for each request. Raises what went wrong."""
        while self._unfinished:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return await self.get()

    def put(self, request_id: str, item: RequestOutput | BaseException) -> None:
        if isinstance(item, BaseException):
            self._error = item
            self._unfinished.clear()
        elif request_id in self._unfinished:
            index = self._index[request_id]
            waiting = self._pending.get(index)
            self._pending[index] = item if waiting is None or not self.delta else joined(waiting, item)
            if item.finished:
                self._unfinished.discard(request_id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def accept(self, error: BaseException | None) -> None:
        """The engine has queued all the requests, or none of them."""
        if error is not None:
            self._unfinished.clear()
        if not self.accepted.done():
            self.accepted.set_result(None) if error is None else self.accepted.set_exception(error)

    def close(self) -> None:
        """Nobody reads on: what has not ended is aborted. Safe to call twice."""
        if self._unfinished:
            left, self._unfinished = list(self._unfinished), set()
            self._abort(left)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request, each with what was new, as one."""
    outs = {out.index: out for out in first.outputs}
    for out in second.outputs:
        outs[out.index] = _joined(outs[out.index], out) if out.index in outs else out
    second.outputs = [outs[i] for i in sorted(outs)]
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    return second


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    second.text = first.text + second.text
    second.token_ids = [*first.token_ids, *second.token_ids]
    if first.logprobs is not None:
        second.logprobs = [*first.logprobs, *(second.logprobs or ())]
    return second


def deliver(batch: Sequence[tuple[OutputStream, str, Any]]) -> None:
    """Everything of one step for one event loop."""
    for stream, request_id, item in batch:
        stream.put(request_id, item)
