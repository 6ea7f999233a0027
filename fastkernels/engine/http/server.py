"""The OpenAI-compatible server: one engine behind the routes of its runner.

A request passes through these stages: gate.py admits it, protocol.py checks its body, generation.py or embeddings.py
handles it, prompts.py makes token ids, and async_llm.py hands it to the engine's thread. Outputs come back through
stream.py; responses.py makes OpenAI's bodies of them, and streaming.py sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from fastkernels import __version__
from fastkernels.engine.async_llm import AsyncLLM, EngineError
from fastkernels.engine.execution import threads
from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.metrics import Metrics
from fastkernels.engine.http.anthropic_api.routes import Messages
from fastkernels.engine.http.audio_api.routes import Audio
from fastkernels.engine.http.audio_api.speech import Speech
from fastkernels.engine.http.gate import Gate
from fastkernels.engine.http.parsing.reasoning import find_reasoning_parser
from fastkernels.engine.http.parsing.tool_parsers import ToolFormat, find_tool_parser
from fastkernels.engine.http.report_file import ReportFile
from fastkernels.engine.http.requests import errors, templates
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.media import MediaPrompts
from fastkernels.engine.http.requests.prompts import Prompts
from fastkernels.engine.http.requests.protocol import DetokenizeRequest, TokenizeRequest
from fastkernels.engine.http.responses_api.routes import Responses
from fastkernels.engine.http.routes.actions import Actions
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.detection import Detection
from fastkernels.engine.http.routes.embeddings import Embeddings
from fastkernels.engine.http.routes.frames import Frames
from fastkernels.engine.http.routes.generation import Generation, Unmasking
from fastkernels.engine.http.routes.pictures import Pictures
from fastkernels.engine.http.routes.recommendation import Recommendation
from fastkernels.engine.http.routes.rendering import Rendering
from fastkernels.engine.http.routes.scoring import Scoring
from fastkernels.engine.http.routes.segmentation import ImageSegmentation, Segmentation
from fastkernels.engine.http.routes.structures import StructureRoutes
from fastkernels.engine.http.routes.videos import Videos
from fastkernels.engine.http.sglang_api.routes import Sglang
from fastkernels.engine.options.config import EngineConfig

CACHE_PATHS = {"/reset_prefix_cache", "/flush_cache"}
# By runner. PATHS: POST routes; GET_PATHS and DELETE_PATHS, where a class has them: GET and DELETE routes
ROUTES: dict[str, tuple[Any, ...]] = {
    "Generate": (Generation, Responses, Messages, Sglang, Audio),
    "Unmask": (Unmasking,),
    "Encode": (Embeddings, Scoring, Detection, ImageSegmentation),
    "Score": (Recommendation,),
    "Act": (Actions,),
    "Render": (Rendering,),
    "Segment": (Segmentation,),
    "Denoise": (Pictures,),
    "DenoiseVideo": (Videos,),
    "Rollout": (Frames,),
    "Fold": (StructureRoutes,),
    "Speak": (Speech,),
}

MAX_DEPTH = 200  # levels of lists and objects that pydantic's parser accepts
_CHUNK = 1 << 20  # bytes whose levels are computed at once
_STEPS = np.zeros(256, np.int8)  # what each byte adds to the level
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def _too_deep(body: bytes) -> bool:
    """Whether a JSON text, which may have errors, has more than MAX_DEPTH levels. 0.3 s for 32 MB."""
    # Without pairs of backslashes, a quote behind a backslash is a part of its text.
    found = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    level, inside = 0, False
    for start in range(0, len(found), _CHUNK):
        part = found[start : start + _CHUNK]
        texts = np.logical_xor.accumulate(part == ord('"')) ^ inside
        levels = np.where(texts, 0, _STEPS[part]).cumsum(dtype=np.int32) + level
        if levels.max() > MAX_DEPTH:
            return True
        level, inside = int(levels[-1]), bool(texts[-1])
    return False


class StrictJSONRequest(Request):
    """Strict JSON: UTF-8, no NaN, no lone surrogates, at most MAX_DEPTH levels."""

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
            if await asyncio.to_thread(_too_deep, body):
                limit = f"at most {MAX_DEPTH} levels of lists and objects are allowed"
                raise ApiError(400, f"the body is nested too deeply: {limit}") from error
            raise ApiError(400, f"the body is not JSON: {error}") from error


class StrictJSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictJSONRequest(request.scope, request.receive))

        return strict


class Server:
    """One engine behind the routes of `app`. `refusal` is the reason why requests are refused; None: they are not."""

    def __init__(self, config: EngineConfig, server_config: ServerConfig | None = None):
        self.config = server_config or ServerConfig()
        self.model_name = self.config.served_model_name or config.model
        # Checked before the model is loaded.
        tool_parser, reasoning = (
            self.config.tool_call_parser,
            find_reasoning_parser(self.config.reasoning_parser),
        )
        if tool_parser is not None:
            find_tool_parser(tool_parser)
        given = self.config.chat_template
        template = None if given is None else templates.load(given)
        self.llm = AsyncLLM(config)
        engine = self.llm.engine
        threads.use_one(engine.runner.device)
        self.metrics = Metrics(self.model_name, engine)
        if template is not None and engine.tokenizer is not None:
            engine.tokenizer.chat_template = template
        self.media = MediaPrompts(engine, self.config, self.model_name)
        self.prompts = Prompts(
            engine.tokenizer, engine.max_model_len, self.config.trust_request_chat_template,
            self.media.placeholders,
        )  # fmt: skip
        tools = ToolFormat(engine.tokenizer, tool_parser)
        self.context = Context(
            self.config, self.llm, self.model_name, self.metrics, self.prompts, tools, reasoning, self.media
        )
        self.report = ReportFile(engine)
        self.llm.on_step = self._on_step
        self.draining = False
        self.created = int(time.time())
        self.routes = self._routes()
        own = [path for routes in ROUTES[engine.kind] for path, *_ in routes.PATHS]
        self.app = Gate(self.routes, self.config, self.refusal, set(own) - CACHE_PATHS)

    def refusal(self) -> str | None:
        if self.llm.dead is not None:
            return f"the engine has ended: {self.llm.dead}"
        if self.draining:
            return "the server is shutting down"
        if self.llm.lost_rank is not None:
            return f"the engine has lost rank {self.llm.lost_rank}"
        return None if self.llm.healthy else "the engine has stopped"

    def close(self, timeout: float = 10.0) -> None:
        """Stop the engine and its processes. Waits for the running step, at most `timeout` seconds."""
        until = time.monotonic() + timeout
        with contextlib.suppress(EngineError, futures.TimeoutError):
            self.llm.call(lambda: self.report.write(force=True)).result(timeout)
        self.llm.shutdown(max(until - time.monotonic(), 0.0))
        self.prompts.close()
        self.media.close()

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
            ("/load", self.load, schema.LOAD),
            ("/v1/models", self.models, schema.MODELS),
            ("/v1/models/{model:path}", self.model, schema.MODEL),
        ):
            app.add_api_route(path, route, methods=["GET"], response_model=None, **extra)
        for path in ("/health", "/ping"):
            app.add_api_route(path, self.health, methods=["HEAD"], include_in_schema=False)
        if self.config.enable_tokenizer_info_endpoint:
            app.add_api_route(
                "/tokenizer_info",
                self.tokenizer_info,
                methods=["GET"],
                response_model=None,
                **schema.TOKENIZER_INFO,
            )
        for path, post, extra in (
            ("/tokenize", self.tokenize, schema.TOKENIZE),
            ("/detokenize", self.detokenize, schema.DETOKENIZE),
        ):
            app.add_api_route(path, post, methods=["POST"], response_model=None, **extra)
        own, known = ROUTES[self.llm.engine.kind], set()
        others = (routes for classes in ROUTES.values() for routes in classes if routes not in own)
        for routes in (*own, *others):
            served = routes(self.context) if routes in own else None
            others_of = [(m, getattr(routes, f"{m}_PATHS", ())) for m in ("GET", "DELETE")]
            for method, paths in (("POST", routes.PATHS), *others_of):
                for path, name, extra in paths:
                    if served is not None:
                        handler = getattr(served, name)
                        app.add_api_route(path, handler, methods=[method], response_model=None, **extra)
                    elif (method, path) not in known:
                        app.add_api_route(path, self._not_served, methods=[method], include_in_schema=False)
                    known.add((method, path))
        return app

    async def health(self) -> Response:
        reason = self.refusal()
        return Response() if reason is None else errors.error_response(ApiError(503, reason))

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def load(self) -> dict[str, int]:
        return {"server_load": self.app.load}

    async def tokenizer_info(self) -> dict[str, Any]:
        """vLLM's answer: tokenizer_config.json without paths, with the chat template in use."""
        tokenizer = self.prompts.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this server runs without a tokenizer")
        given = {k: v for k, v in tokenizer.init_kwargs.items() if k not in ("vocab_file", "merges_file")}
        template = {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
        return {**_plain(given), "tokenizer_class": type(tokenizer).__name__, **template}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> dict[str, Any]:
        self.context.check_model(model)
        return self._card()

    async def _not_served(self, raw: Request) -> None:
        raise ApiError(
            404, f"{raw.url.path} is not available: {self.model_name!r} is for {self.llm.engine.use}", "model"
        )  # fmt: skip

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self.context.check_model(body.model)
        if body.prompt is not None:
            ids = await self.prompts.text(body.prompt, body.add_special_tokens is not False)
        else:
            ids = (await self.context.chat(body, body.add_special_tokens)).token_ids
        strings = self.prompts.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {
            "count": len(ids), "max_model_len": self.llm.engine.max_model_len, "tokens": ids, "token_strs": strings,
        }  # fmt: skip

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        self.context.check_model(body.model)
        return {"prompt": self.prompts.decode(body.tokens)}

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model_name, "object": "model", "created": self.created, "owned_by": "fastkernels",
            "root": self.llm.config.model, "parent": None, "max_model_len": self.llm.engine.max_model_len,
        }  # fmt: skip


def _plain(value: Any) -> Any:
    """As JSON: of an added token its text, of another object its description."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)
