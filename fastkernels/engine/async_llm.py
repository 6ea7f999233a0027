"""The engine in a thread of its own, with asyncio streams: what the server runs on."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from .config import EngineConfig
from .llm_engine import LLMEngine, StepStats
from .request import Request, RequestOutput
from .sampling_params import SamplingParams

log = logging.getLogger("fastkernels")


class EngineError(RuntimeError):
    """A step failed, or the engine has stopped: the request is lost, the message says why."""


class AsyncLLM:
    """Requests come from coroutines; one thread steps the engine. A step that fails ends its requests, not the engine.

    on_step(stats) is called in the engine's thread after every step.
    """

    def __init__(self, config: EngineConfig, on_step: Callable[[StepStats], None] | None = None):
        self.config = config
        self.engine = LLMEngine(config)
        self.on_step = on_step
        self.error: str | None = None  # of the last step, None if it went well
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Any]]] = {}
        self._thread = threading.Thread(target=self._run, name="fastkernels-engine", daemon=True)
        self._stopped = False
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self.error is None

    async def generate(
        self, prompt: str | Sequence[int] | Request, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come. Leaving the iteration early aborts the request.

        Raises ValueError, QueueFull (before the first output) and EngineError.
        """
        request = prompt if isinstance(prompt, Request) else self.check(prompt, params, request_id)
        stream: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._submit(lambda: self._add(request, loop, stream))
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._submit(lambda: self._abort(request.request_id))

    def check(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str) -> Request:
        """A request, checked, not queued. Raises ValueError."""
        return self.engine.make_request(request_id, prompt, params)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the engine's thread, between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._submit(run)
        return future

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop after the step that runs; requests under way get an EngineError."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _submit(self, work: Callable[[], None]) -> None:
        if self._stopped:
            raise EngineError("the engine has stopped")
        self._inbox.put(work)

    def _add(self, request: Request, loop: asyncio.AbstractEventLoop, stream: asyncio.Queue[Any]) -> None:
        self._streams[request.request_id] = (loop, stream)
        try:
            self.engine.add_request(request.request_id, request)
        except Exception as error:
            self._send([(request.request_id, error)])

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.engine.abort_request(request_id)

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._take(block=not self.engine.has_unfinished_requests())
                if not self._stopped and self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    self.error = None
                    self._send([(o.request_id, o) for o in outputs])
                if self.on_step is not None:
                    self.on_step(self.engine.take_stats())
            except Exception as error:
                log.exception("a step failed; its requests are ended")
                self.error = f"{type(error).__name__}: {error}"
                self._fail(EngineError(f"the engine failed: {self.error}"))
        self._fail(EngineError("the engine has stopped"))

    def _take(self, block: bool) -> None:
        """Do what has come in; with nothing to step, wait for something."""
        while True:
            try:
                work = self._inbox.get(block=block)
            except queue.Empty:
                return
            if work is None:
                self._stopped = True
                return
            work()
            block = False

    def _fail(self, error: EngineError) -> None:
        self.engine.abort_request(list(self.engine.requests))
        self._send([(request_id, error) for request_id in list(self._streams)])

    def _send(self, items: list[tuple[str, Any]]) -> None:
        """Hand outputs to their streams: one wake-up of a loop for all of a step's."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Any], Any]]] = {}
        for request_id, item in items:
            found = self._streams.get(request_id)
            if found is None:
                continue
            if isinstance(item, BaseException) or item.finished:
                del self._streams[request_id]
            loops.setdefault(found[0], []).append((found[1], item))
        for loop, batch in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[asyncio.Queue[Any], Any]]) -> None:
    for stream, item in batch:
        stream.put_nowait(item)
