"""The engine in its own thread, with asyncio streams. The server runs on it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from fastkernels.engine.engines.budget_engine import RequestDoesNotFit
from fastkernels.engine.engines.engine import StepStats, make_engine
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.scheduling.request import RequestOutput
from fastkernels.engine.stream import OutputStream, deliver

log = logging.getLogger("fastkernels")
MAX_FAILED_STEPS = 3  # in a row: then the engine itself is broken


class EngineError(RuntimeError):
    """A request failed for the reason in the message. stopped: later requests would fail, too."""

    def __init__(self, message: str, stopped: bool = False):
        super().__init__(message)
        self.stopped = stopped


class AsyncLLM:
    """Takes requests from coroutines; one thread steps the engine.

    A failed step ends all requests but not the engine. The engine ends after an error with the attribute `fatal`, after
    a device error, or after MAX_FAILED_STEPS in a row. `dead` then holds the reason, and every request gets an
    EngineError.

    on_step(stats) is called in the engine's thread after every step; on_death() once if the engine ends with an error.
    Raises what LLM raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepStats], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ):
        self.config = config
        self.engine: Any = make_engine(config)
        self.on_step, self.on_death = on_step, on_death
        self.dead: str | None = None
        self.num_failed_steps = 0
        self._failed_in_a_row = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Protects `_stopped` against concurrent submissions. Garbage that is collected inside may close a stream.
        self._lock = threading.RLock()
        self._streams: dict[str, OutputStream] = {}  # used by the engine's thread only
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fastkernels-engine", daemon=True)
        self.engine.executor.on_failure = self._rank_died
        atexit.register(self.shutdown)  # a thread inside PyTorch at interpreter exit aborts the process
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the engine accepts requests."""
        return self._thread.is_alive() and self.dead is None and self.lost_rank is None

    @property
    def lost_rank(self) -> int | None:
        """A rank whose process has ended; the engine's thread ends the engine as soon as it sees it."""
        return self.engine.executor.lost_rank

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs of one request as they are made, in the form of params.output_kind.

        Closing the iterator early aborts the request. A lower priority goes first. Raises ValueError, QueueFull (before
        the first output) and EngineError.
        """
        await self.prepare(params)
        stream = await self.open([self.make_request(request_id, prompt, params, priority)])
        try:
            while not stream.finished:
                for _, output in await stream.get():
                    yield output
        finally:
            stream.close()

    async def prepare(self, params: Any) -> None:
        """Wait until make_request can use these parameters at once: compile their grammar in another thread.

        Raises ValueError for a grammar that cannot be used.
        """
        structured = getattr(params, "structured_outputs", None)
        grammars = getattr(self.engine, "grammars", None)
        if structured is not None and grammars is not None:
            await grammars.ready(structured)

    def make_request(self, request_id: str, prompt: Any, params: Any, priority: int = 0, **more: Any) -> Any:
        """Check a request without queuing it; see Engine. Safe in any thread. Raises ValueError."""
        return self.engine.make_request(request_id, prompt, params, priority, **more)

    async def open(self, requests: Sequence[Any]) -> OutputStream:
        """Queue requests, all or none, and return the stream of their outputs.

        The caller must close() a stream that it does not read to the end. Raises QueueFull and EngineError.
        """
        ids = [r.request_id for r in requests]
        stream = OutputStream(ids, self.abort, requests[0].streams_deltas)
        self._submit(lambda: self._add(requests, stream))
        try:
            await stream.accepted
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests without further outputs. Safe in any thread."""
        try:
            self._submit(lambda: self._abort(request_ids))
        except EngineError:
            return  # the engine has ended, and its requests with it

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the engine's thread between two steps. Raises EngineError if the engine has ended."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._submit(run)
        return future

    def fail_all(self, message: str) -> None:
        """End every request with an EngineError. Safe in any thread."""
        try:
            self._submit(lambda: self._fail(EngineError(message, stopped=True)))
        except EngineError:
            return

    def shutdown(self, timeout: float = 10.0) -> bool:
        """Stop after the running step, and end the processes of other ranks. Unfinished requests get an EngineError.

        Returns whether the step ended within `timeout` seconds.
        """

        def stop() -> None:
            self._stopped = True

        atexit.unregister(self.shutdown)
        with contextlib.suppress(EngineError):
            self._submit(stop)
        self._thread.join(timeout)
        stopped = not self._thread.is_alive()
        self.engine.shutdown()
        return stopped

    def _rank_died(self) -> None:
        """Run the check that ends the engine, even while there is nothing to step."""
        with contextlib.suppress(EngineError):
            self._submit(self.engine.executor.check)

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._stopped:
                raise EngineError(self._why_stopped(), stopped=True)
            self._inbox.put(work)

    def _why_stopped(self) -> str:
        return f"the engine has stopped{f': {self.dead}' if self.dead else ''}"

    def _add(self, requests: Sequence[Any], stream: OutputStream) -> None:
        error: BaseException | None = None
        added: list[str] = []
        try:
            if self._stopped:
                raise EngineError(self._why_stopped(), stopped=True)
            self.engine.check_room(requests)
            for request in requests:
                self.engine.add_request(request.request_id, request)
                added.append(request.request_id)
                self._streams[request.request_id] = stream
        except Exception as failure:
            error = failure
            self._abort(added)
        _call(stream.loop, stream.accept, error)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self.engine.abort_request(request_ids)

    def _run(self) -> None:
        try:
            while not self._stopped:
                try:
                    self._take(block=not self.engine.has_unfinished_requests())
                    outputs: list[Any] = []
                    if not self._stopped and self.engine.has_unfinished_requests():
                        outputs = self.engine.step()
                        self._failed_in_a_row = 0
                    try:  # before the outputs: a client that has its answer finds it counted in /metrics
                        self._count()
                    finally:
                        self._send([(o.request_id, o) for o in outputs])
                except Exception as error:
                    self._step_failed(error)
        finally:
            self._end()

    def _count(self) -> None:
        stats = self.engine.take_stats()
        if self.on_step is not None:
            self.on_step(stats)

    def _step_failed(self, error: Exception) -> None:
        if isinstance(error, RequestDoesNotFit):
            self._send([(error.request_id, EngineError(str(error)))])
            return
        log.exception("a step failed; all requests are ended")
        self.num_failed_steps += 1
        self._failed_in_a_row += 1
        why = f"{type(error).__name__}: {error}"
        # A device error stays with its context: every later step would fail, too.
        device = isinstance(error, getattr(torch, "AcceleratorError", ()))
        if getattr(error, "fatal", False) or device or self._failed_in_a_row >= MAX_FAILED_STEPS:
            self.dead = why
            self._stopped = True
            return
        try:
            self._fail(EngineError(f"the engine failed: {why}"))
        except Exception as second:
            self.dead, self._stopped = f"{why}; then {type(second).__name__}: {second}", True

    def _end(self) -> None:
        """Answer everything that still waits."""
        with self._lock:
            self._stopped = True
        while not self._inbox.empty():
            try:
                self._inbox.get()()
            except Exception as error:
                log.warning("after the engine's end: %s: %s", type(error).__name__, error)
        stopped = EngineError(self._why_stopped(), stopped=True)
        self._send([(request_id, stopped) for request_id in list(self._streams)])
        if self.dead is not None:
            log.critical("the engine has ended: %s", self.dead)
            if self.on_death is not None:
                self.on_death()

    def _take(self, block: bool) -> None:
        """Do the submitted work; with block=True, wait for some."""
        while not self._stopped:
            try:
                work = self._inbox.get(block=block)
            except queue.Empty:
                return
            work()
            block = False

    def _fail(self, error: EngineError) -> None:
        self.engine.abort_all()  # before the streams learn of it: their readers may inspect the engine
        try:
            self._count()
        except Exception:  # it may be what failed
            log.exception("requests that ended are not counted")
        self._send([(request_id, error) for request_id in list(self._streams)])

    def _send(self, items: list[tuple[str, Any]]) -> None:
        """Hand outputs to their streams, with one wake-up of each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, str, Any]]] = {}
        for request_id, item in items:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            if isinstance(item, BaseException) or item.finished:
                del self._streams[request_id]
            loops.setdefault(stream.loop, []).append((stream, request_id, item))
        for loop, batch in loops.items():
            _call(loop, deliver, batch)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:  # the loop is closed
        log.debug("an event loop was closed before its requests ended")
