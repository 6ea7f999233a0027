"""The OpenAI-compatible server's routes.

A request's way: gate.py lets it in, protocol.py checks its body, prompts.py makes token ids, async_llm.py hands it to
the engine's thread; back come outputs (stream.py), which responses.py writes as OpenAI's bodies, and http_stream.py
sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json

from fastkernels import __version__
from fastkernels.engine.async_llm import AsyncLLM, EngineError
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.http import errors, schema
from fastkernels.engine.http import logprobs as answer_logprobs
from fastkernels.engine.http.config import ServerConfig
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.gate import Gate
from fastkernels.engine.http.metrics import Metrics
from fastkernels.engine.http.prompts import Prompts
from fastkernels.engine.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from fastkernels.engine.http.report_file import ReportFile
from fastkernels.engine.http.responses import Answer, ChatAnswer, CompletionAnswer, Prompt
from fastkernels.engine.http.streaming import EventStream, unless_gone
from fastkernels.engine.scheduling.outputs import RequestGroup
from fastkernels.engine.scheduling.scheduler import QueueFull


class StrictJSONRequest(Request):
    """JSON as the standard has it: UTF-8, no NaN, no lone surrogates, no bottomless nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            try:
                body.decode()
            except UnicodeDecodeError as wrong:
                byte, at = wrong.object[wrong.start], wrong.start
                raise ApiError(400, f"the body is not UTF-8: byte 0x{byte:02x} at position {at}") from error
            raise ApiError(400, f"the body is not JSON: {error}") from error


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

        return strict


class Server:
    """One engine behind the routes of `app`. `refusal` says why requests are refused, None while they are not."""

    def __init__(self, config: EngineConfig, server_config: ServerConfig | None = None):
        self.config = server_config or ServerConfig()
        self.model_name = self.config.served_model_name or config.model
        self.llm = AsyncLLM(config)
        engine = self.llm.engine
        self.metrics = Metrics(self.model_name, engine)
        self.prompts = Prompts(engine.tokenizer, engine.max_model_len)
        self.report = ReportFile(engine)
        self.llm.on_step = self._on_step
        self.draining = False
        self.created = int(time.time())
        self.routes = self._routes()
        self.app = Gate(self.routes, self.config.api_key, self.config.max_body_size, self.refusal)

    def refusal(self) -> str | None:
        if self.llm.dead is not None:
            return f"the engine has ended: {self.llm.dead}"
        if self.draining:
            return "the server is shutting down"
        return None if self.llm.healthy else "the engine has stopped"

    def close(self, timeout: float = 10.0) -> None:
        """Stop the engine and its processes. Blocks until its step is done, for `timeout` seconds at most."""
        until = time.monotonic() + timeout
        with contextlib.suppress(EngineError, futures.TimeoutError):
            self.llm.call(lambda: self.report.write(force=True)).result(timeout)
        self.llm.shutdown(max(until - time.monotonic(), 0.0))
        self.prompts.close()

    def _on_step(self, stats: Any) -> None:
        self.metrics.observe(stats)
        self.metrics.failed_steps = self.llm.num_failed_steps
        self.report.write()

    def _routes(self) -> FastAPI:
        app = FastAPI(title="FastKernels", version=__version__)
        app.router.route_class = StrictJSONRoute
        errors.install(app)
        for path, route, extra in (
            ("/health", self.health, schema.EMPTY),
            ("/ping", self.health, schema.EMPTY),
            ("/version", self.version, schema.VERSION),
            ("/metrics", self.metrics_text, schema.METRICS),
            ("/v1/models", self.models, schema.MODELS),
            ("/v1/models/{model:path}", self.model, schema.MODEL),
        ):
            app.add_api_route(path, route, methods=["GET"], response_model=None, **extra)
        for path, post, extra in (
            ("/v1/completions", self.completions, schema.COMPLETION),
            ("/v1/chat/completions", self.chat, schema.CHAT),
            ("/tokenize", self.tokenize, schema.TOKENIZE),
            ("/detokenize", self.detokenize, schema.DETOKENIZE),
            ("/reset_prefix_cache", self.reset_prefix_cache, schema.DONE),  # vLLM's name
            ("/flush_cache", self.reset_prefix_cache, schema.DONE),  # SGLang's
        ):
            app.add_api_route(path, post, methods=["POST"], response_model=None, **extra)
        return app

    async def health(self) -> Response:
        reason = self.refusal()
        return Response() if reason is None else errors.error_response(ApiError(503, reason))

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> dict[str, Any]:
        self._check_model(model)
        return self._card()

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self._check_model(body.model)
        if body.prompt is not None:
            ids = await self.prompts.text(body.prompt, body.add_special_tokens is not False)
        else:
            ids = await self.prompts.chat(body, body.add_special_tokens)
        strings = self.prompts.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {
            "count": len(ids), "max_model_len": self.llm.engine.max_model_len, "tokens": ids, "token_strs": strings,
        }  # fmt: skip

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        self._check_model(body.model)
        return {"prompt": self.prompts.decode(body.tokens)}

    async def reset_prefix_cache(self) -> dict[str, bool]:
        """What has been computed is found by no later request; what runs goes on."""
        await asyncio.wrap_future(self.llm.call(self.llm.engine.blocks.reset_cache))
        return {"success": True}

    async def completions(self, body: CompletionRequest, raw: Request) -> Response:
        self._check_model(body.model)
        prompts = []
        for given in body.prompts:
            ids = given if isinstance(given, list) else await self._encode(body, given)
            text = ""
            if body.echo:
                text = given if isinstance(given, str) else self.prompts.decode(given)
            prompts.append(Prompt(ids, text))
        answer = CompletionAnswer(
            self._id("cmpl", body, raw), self.model_name, body, prompts, self._spell(body)
        )
        return await self._answer(answer, body, raw)

    async def chat(self, body: ChatCompletionRequest, raw: Request) -> Response:
        self._check_model(body.model)
        more = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        tools = body.tools if body.tool_choice != "none" else None
        ids = await self.prompts.chat(
            body.model_copy(update={"tools": tools}), body.add_special_tokens, **more
        )
        answer = ChatAnswer(
            self._id("chatcmpl", body, raw), self.model_name, body, [Prompt(ids)], self._spell(body)
        )
        return await self._answer(answer, body, raw)

    async def _answer(self, answer: Answer, body: GenerationRequest, raw: Request) -> Response:
        requests = self._requests(answer.prompts, body)
        try:
            # Queued before the status is sent: a full queue is a 429, not a broken stream.
            outputs = await self.llm.open(requests)
        except QueueFull:
            self.metrics.refused += 1
            raise
        if body.stream:
            return EventStream(answer, outputs, self.config.stall_timeout)
        try:
            found = await unless_gone(raw, outputs.rest())
        finally:
            outputs.close()
        return (
            Response(status_code=499)
            if found is None
            else Response(to_json(answer.whole(found)), media_type="application/json")
        )

    def _requests(self, prompts: Sequence[Prompt], body: GenerationRequest) -> list[RequestGroup]:
        sequences, most = len(prompts) * (body.n or 1), self.llm.config.max_waiting
        if sequences > most:
            raise ApiError(
                400, f"{sequences} sequences (prompts times n) are more than may wait: {most}", "prompt"
            )
        own = uuid.uuid4().hex  # the engine's ids are ours: a client may use its own twice
        try:
            return [
                self.llm.make_request(f"{own}-{i}", p.token_ids, body.sampling_params(), body.priority or 0)
                for i, p in enumerate(prompts)
            ]
        except ValueError as error:
            raise errors.refused(error) from error

    async def _encode(self, body: CompletionRequest, text: str) -> list[int]:
        return await self.prompts.text(text, body.add_special_tokens is not False)

    def _spell(self, body: GenerationRequest) -> answer_logprobs.Spell:
        return answer_logprobs.speller(self.llm.engine.tokenizer, bool(body.return_tokens_as_token_ids))

    @staticmethod
    def _id(prefix: str, body: GenerationRequest, raw: Request) -> str:
        """The client's id, of the body or of the header that vLLM reads too, or one of our own."""
        given = body.request_id or raw.headers.get("x-request-id", "")[:256]
        return f"{prefix}-{given or uuid.uuid4().hex}"

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model_name, "object": "model", "created": self.created, "owned_by": "fastkernels",
            "root": self.llm.config.model, "parent": None, "max_model_len": self.llm.engine.max_model_len,
        }  # fmt: skip

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self.model_name, self.llm.config.model):
            raise ApiError(
                404, f"the model {name!r} does not exist; this server has {self.model_name!r}", "model"
            )
