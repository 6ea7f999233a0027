"""Outputs on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastkernels.engine.scheduling.request import CompletionOutput, RequestOutput


class OutputStream:
    """The outputs of some requests, step by step. Used in one event loop.

    For a slow reader, outputs are merged, so that the stream never holds more than the requests' text. delta: outputs
    hold what is new (RequestOutputKind.DELTA) and are joined; otherwise the last output replaces earlier ones.
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
        """Whether everything has been read, including an error."""
        return not self._unfinished and not self._pending and self._error is None

    async def get(self) -> list[tuple[int, RequestOutput]]:
        """Wait for news: (index of the request, output). Raises the error that ended the requests."""
        while not self._pending and self._error is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        if self._pending:
            items, self._pending = list(self._pending.items()), {}
            return items
        assert self._error is not None
        raise self._error

    async def rest(self) -> list[tuple[int, RequestOutput]]:
        """Wait for the end: one output for each request. Raises the error that ended the requests."""
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
            self._pending[index] = item if waiting is None or not self.delta else _merged(waiting, item)
            if item.finished:
                self._unfinished.discard(request_id)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def accept(self, error: BaseException | None) -> None:
        """Report that the engine has queued all requests, or none because of `error`."""
        if error is not None:
            self._unfinished.clear()
        if not self.accepted.done():
            self.accepted.set_result(None) if error is None else self.accepted.set_exception(error)

    def close(self) -> None:
        """Stop reading, and abort unfinished requests. Safe to repeat."""
        if self._unfinished:
            left, self._unfinished = list(self._unfinished), set()
            self._abort(left)


def _merged(first: Any, second: Any) -> Any:
    return joined(first, second) if isinstance(second, RequestOutput) else first.joined(second)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Join two delta outputs of one request."""
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
    """Put all outputs of one step into their streams."""
    for stream, request_id, item in batch:
        stream.put(request_id, item)
