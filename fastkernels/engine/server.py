"""The OpenAI-compatible server: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from fastkernels import __version__

from .async_llm import AsyncLLM, EngineError
from .config import EngineConfig
from .metrics import Metrics, ReportFile
from .protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, error_body
from .request import Request as EngineRequest
from .responses import Answer, ChatAnswer
from .scheduler import QueueFull

log = logging.getLogger("fastkernels")
T = TypeVar("T")


class Server:
    """One engine behind the routes of `app`. served_model_name: what clients call the model."""

    def __init__(self, config: EngineConfig, served_model_name: str | None = None):
        self.model_name = served_model_name or config.model
        self.metrics = Metrics(self.model_name)
        self.llm = AsyncLLM(config)
        self.report = ReportFile(self.llm.engine)
        self.report.write(force=True)
        self.llm.on_step = self._on_step
        self.created = int(time.time())
        self.app = self._app()

    def _on_step(self, stats: Any) -> None:
        self.metrics.observe(stats, self.llm.engine)
        self.report.write()

    def close(self) -> None:
        self.llm.shutdown()
        self.report.write(force=True)

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            self.close()

        app = FastAPI(title="FastKernels", version=__version__, lifespan=lifespan)
        app.add_exception_handler(RequestValidationError, _invalid)
        app.add_exception_handler(HTTPException, _http_error)
        for error in (ValueError, QueueFull, EngineError, Exception):
            app.add_exception_handler(error, _failed)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/metrics", self.metrics_text, methods=["GET"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        return app

    async def health(self) -> Response:
        if self.llm.healthy:
            return Response(status_code=200)
        return JSONResponse(error_body(f"the engine failed: {self.llm.error}", 503), 503)

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        model = {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "fastkernels",
            "root": self.llm.config.model,
            "max_model_len": self.llm.engine.max_model_len,
        }
        return {"object": "list", "data": [model]}

    async def completions(self, body: CompletionRequest, raw: Request) -> Response:
        self._check_model(body.model)
        prompts = body.prompts()
        if not prompts:
            raise ValueError("prompt is an empty list")
        params = body.sampling_params(body.max_tokens)
        answer = Answer(f"cmpl-{uuid.uuid4().hex}", self.model_name, body)
        requests = [self.llm.check(p, params, f"{answer.id}-{i}") for i, p in enumerate(prompts)]
        return await self._answer(answer, requests, body, raw)

    async def chat(self, body: ChatCompletionRequest, raw: Request) -> Response:
        self._check_model(body.model)
        tokenizer = self.llm.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError(f"{self.model_name} has no chat template; use /v1/completions")
        try:
            ids = tokenizer.apply_chat_template(
                body.conversation(), add_generation_prompt=body.add_generation_prompt, tokenize=True,
                return_dict=True, **(body.chat_template_kwargs or {}),
            )["input_ids"]  # fmt: skip
        except Exception as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        params = body.sampling_params(body.max_completion_tokens or body.max_tokens)
        answer = ChatAnswer(f"chatcmpl-{uuid.uuid4().hex}", self.model_name, body)
        return await self._answer(answer, [self.llm.check(ids, params, answer.id)], body, raw)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.model_name, self.llm.config.model):
            raise HTTPException(
                404, f"The model {name!r} does not exist; this server has {self.model_name!r}."
            )

    async def _answer(
        self, answer: Answer, requests: list[EngineRequest], body: GenerationRequest, raw: Request
    ) -> Response:
        merged = _merge(self.llm, requests)
        try:
            # The first output is waited for before the status is sent: a full queue is a 429, not a broken stream.
            first = await _unless_gone(raw, anext(merged))
            if first is not None and body.stream:
                return StreamingResponse(_events(answer, first, merged), media_type="text/event-stream")
            outputs = None if first is None else await _unless_gone(raw, _collect(first, merged))
        except BaseException:
            await merged.aclose()
            raise
        await merged.aclose()
        return Response(status_code=499) if outputs is None else JSONResponse(answer.whole(outputs))


async def _collect(first: tuple[int, Any], rest: AsyncIterator[tuple[int, Any]]) -> list[Any]:
    """The last output of every request, by index."""
    last = {first[0]: first[1]}
    async for index, output in rest:
        last[index] = output
    return [last[i] for i in sorted(last)]


async def _merge(llm: AsyncLLM, requests: list[EngineRequest]) -> AsyncGenerator[tuple[int, Any], None]:
    """(index, output) of all the requests as they come. Closing it aborts those that are not done."""
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def pump(index: int, request: EngineRequest) -> None:
        try:
            async for output in llm.generate(request, request.params, request.request_id):
                queue.put_nowait((index, output))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(i, r)) for i, r in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_gone(raw: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None, and it is cancelled, when the client goes away first."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_gone(raw))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(raw: Request) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass


async def _events(answer: Answer, first: Any, rest: Any) -> AsyncIterator[str]:
    """Server-sent events; the client's leaving cancels this and so closes `rest`."""
    try:
        for chunk in answer.opening():
            yield f"data: {json.dumps(chunk)}\n\n"
        item = first
        while item is not None:
            for chunk in answer.chunks(*item):
                yield f"data: {json.dumps(chunk)}\n\n"
            item = await anext(rest, None)
        for chunk in answer.closing():
            yield f"data: {json.dumps(chunk)}\n\n"
    except Exception as error:
        log.warning("a stream ended with %s: %s", type(error).__name__, error)
        yield f"data: {json.dumps(error_body(str(error), 500))}\n\n"
    finally:
        await rest.aclose()
    yield "data: [DONE]\n\n"


async def _invalid(raw: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    message = str(first["msg"]).removeprefix("Value error, ")
    text = f"{where}: {message}" if where and where not in message else message
    return JSONResponse(error_body(text, 400, param=where or None), 400)


async def _http_error(raw: Request, error: Any) -> JSONResponse:
    return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code)


async def _failed(raw: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, ValueError) else 429 if isinstance(error, QueueFull) else 500
    if status == 500:
        log.error("%s %s: %s: %s", raw.method, raw.url.path, type(error).__name__, error)
    return JSONResponse(error_body(str(error), status), status)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the model is loaded. Raises OSError that says so if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port"
        ) from error
    return sock


def serve(config: EngineConfig, sock: socket.socket, served_model_name: str | None = None) -> None:
    """Serve until SIGINT or SIGTERM: streams under way end with an error, then the process returns from here."""
    import uvicorn

    server = Server(config, served_model_name)
    options = uvicorn.Config(
        server.app, log_level="warning", timeout_graceful_shutdown=2, timeout_keep_alive=60
    )
    host, port = sock.getsockname()[:2]
    # After its shutdown uvicorn raises the signal again for whoever had it before: a server that was told to stop has
    # ended well, so that is nobody.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    log.info("serving %s at http://%s:%d/v1", server.model_name, host, port)
    uvicorn.Server(options).run(sockets=[sock])
