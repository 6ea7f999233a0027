"""Routes of encoders: OpenAI's embeddings, vLLM's classification and pooling, of texts, images and videos."""

from __future__ import annotations

import asyncio
import base64
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.streaming import unless_gone
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import (
    FORMS,
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    PoolingTaskRequest,
    TextPoolingRequest,
)
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.inputs.images import decode, decode_frames
from fastkernels.engine.inputs.tokenizer import cut
from fastkernels.engine.sampling.pooling import PoolingParams

T = TypeVar("T")
G = TypeVar("G")
AT_ONCE = min(4, os.cpu_count() or 1)  # images of a request that are decoded and resized
# By how the model's scores are computed
DEFAULT_TASKS = {"cross-encoder": "classify", "late-interaction": "token_embed", "bi-encoder": "embed"}


class Embeddings:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (
        ("/v1/embeddings", "embeddings", schema.EMBEDDINGS),
        ("/classify", "classify", schema.CLASSIFICATION),
        ("/pooling", "pooling", schema.POOLING),
    )

    def __init__(self, context: Context):
        self.context = context

    async def pooling(self, body: PoolingTaskRequest, raw: Request) -> Response:
        """The result of a task for each input: a vector, or one for each token, or weights or probabilities."""
        self.context.check_model(body.model)
        inputs = self._inputs(body)
        params = PoolingParams(
            body.task or DEFAULT_TASKS[self._scored_by()], body.dimensions, body.use_activation,
            body.input_type or "",
        )  # fmt: skip
        found = await encoded(self.context, body, params, inputs, raw)
        if found is None:
            return Response(status_code=499)
        as_text = body.encoding_format == "base64"
        data = [
            {"index": i, "object": "pooling", "data": _base64(o.outputs.data) if as_text else o.outputs.data.tolist()}
            for i, o in enumerate(found)
        ]  # fmt: skip
        answer = {
            "id": f"pooling-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name, "data": data, "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    def _inputs(self, body: TextPoolingRequest) -> Inputs:
        limit = self.context.prompt_limit(body.truncate_prompt_tokens, 0)
        return Inputs(self.context, body.add_special_tokens is not False, limit, body.truncation_side)

    def _scored_by(self) -> str:
        engine: Any = self.context.llm.engine
        return (
            "cross-encoder" if engine.num_labels else getattr(engine.runner.model, "scored_by", "bi-encoder")
        )

    async def embeddings(self, body: EmbeddingRequest, raw: Request) -> Response:
        """One vector for each input."""
        self.context.check_model(body.model)
        params = PoolingParams(dimensions=body.dimensions, use_activation=body.use_activation)
        found = await encoded(self.context, body, params, self._inputs(body), raw)
        if found is None:
            return Response(status_code=499)
        as_text = body.encoding_format == "base64"
        vectors = [_base64(o.outputs.data) if as_text else o.outputs.embedding for o in found]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
        answer = {"object": "list", "data": data, "model": self.context.model_name, "usage": usage(found)}
        return Response(to_json(answer), media_type="application/json")

    async def classify(self, body: ClassificationRequest, raw: Request) -> Response:
        """The classes' probabilities for each input, and the likeliest one's label."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        if not engine.num_labels:
            raise ApiError(
                404, f"/classify is not available: {self.context.model_name!r} has no classifier", "model"
            )
        params = PoolingParams("classify", use_activation=body.use_activation)
        found = await encoded(self.context, body, params, self._inputs(body), raw)
        if found is None:
            return Response(status_code=499)
        names = getattr(engine.hf_config, "id2label", None) or {}
        data = []
        for i, output in enumerate(found):
            probs, best = output.outputs.probs, int(np.argmax(output.outputs.data))
            label = str(names.get(best, f"LABEL_{best}"))
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
        answer = {
            "id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name, "data": data, "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")


async def encoded(
    context: Context, body: PoolingRequest, params: PoolingParams, read: Inputs, raw: Request
) -> list[Any] | None:
    """The outputs of all inputs, in order; None if the client has gone."""
    own, given = uuid.uuid4().hex, body.inputs
    waiting = context.llm.config.max_waiting
    if len(given) > waiting:
        raise ApiError(400, f"{len(given)} inputs are more than the queue holds, {waiting}", "input")

    async def request(i: int, one: Any) -> Any:
        def make(prompt: Any) -> Any:
            return context.llm.make_request(f"{own}-{i}", prompt, params, body.priority or 0)

        try:
            return await read.then(make, i, one)
        except ValueError as error:
            message = str(error)
            field = message.partition(" ")[0]
            if field in ("dimensions", "task", "role"):
                raise ApiError(400, message, {"role": "input_type"}.get(field, field)) from error
            raise ApiError(400, message.replace("the prompt", f"input {i}", 1), "input") from error

    requests = await several(request, given) if read.takes else await one_by_one(request, given)
    found = await results(context, requests, raw)
    check_finite([o.outputs.data for o in found or ()], "input", context)
    return found


async def one_by_one(work: Callable[[int, G], Awaitable[T]], given: Sequence[G]) -> list[T]:
    """The results of work(i, input i), in order."""
    return [await work(i, one) for i, one in enumerate(given)]


async def several(work: Callable[[int, G], Awaitable[T]], given: Sequence[G]) -> list[T]:
    """The same for work in threads, AT_ONCE inputs at a time. Raises the error of the first input that has one."""
    if len(given) < 2:
        return await one_by_one(work, given)
    gate = asyncio.Semaphore(AT_ONCE)

    async def do(i: int, one: G) -> T:
        async with gate:
            return await work(i, one)

    tasks = [asyncio.create_task(do(i, one)) for i, one in enumerate(given)]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nothing is logged


def check_finite(found: Iterable[np.ndarray | float], what: str, context: Context) -> None:
    """Raise ApiError if a result is NaN or infinite, which no JSON number is. what: an input's name in the message."""
    wrong = next((i for i, values in enumerate(found) if not np.isfinite(values).all()), None)
    if wrong is not None:
        raise ApiError(
            500, f"the result of {what} {wrong} has values that are NaN or infinite: {context.model_name!r} has damaged"
            " weights, or needs a --dtype with larger numbers",
        )  # fmt: skip


async def results(context: Context, requests: list[Any], raw: Request) -> list[Any] | None:
    """The outputs of all requests, in order; None if the client has gone."""
    outputs = await context.open(requests)
    try:
        found = await unless_gone(raw, outputs.rest())
    finally:
        outputs.close()
    if found is None:
        return None
    return [output for _, output in sorted(found, key=lambda item: item[0])]


class Inputs:
    """Reads one input at a time: token ids of texts, a PIL image, the list of a video's frames, or a clip's file.

    special, limit, side: of Prompts.text.
    """

    def __init__(
        self, context: Context, special: bool = True, limit: int | None = None, side: str | None = None
    ):
        self.context, self.special, self.limit, self.side = context, special, limit, side
        # An image is a video of one frame.
        self.takes = {"images": ("image_url",), "videos": ("video_url", "image_url")}.get(
            context.llm.engine.inputs, ()
        )
        self.clips = getattr(context.llm.engine, "follows", False)  # also as files, such as MP4
        if self.clips:
            self.takes += ("video_url",)

    async def __call__(self, i: int, given: str | list[int] | dict[str, Any]) -> Any:
        """Raises ApiError, which names input i."""
        return await self.then(lambda prompt: prompt, i, given)

    async def then(self, make: Callable[[Any], T], i: int, given: str | list[int] | dict[str, Any]) -> T:
        """make(input i), of media in the same thread: resizing an image takes milliseconds. Raises as __call__."""
        if self.takes and isinstance(given, str):
            given = _part(given)
        kind = given["type"] if isinstance(given, dict) else ""
        if kind not in (self.takes or ("",)):
            wanted = " or ".join(f"{name.removesuffix('_url')}s, as {FORMS[name]}" for name in self.takes)
            wanted = f"takes {wanted or 'text or token ids, not images or videos'}"
            raise ApiError(400, f"input {i} cannot be used: {self.context.model_name!r} {wanted}", "input")
        if isinstance(given, dict):
            read = _image if kind == "image_url" else _clip if self.clips else _video
            return await asyncio.to_thread(_read_then, make, read, i, given[kind]["url"])
        if isinstance(given, list):
            return make(given if self.limit is None else cut(given, self.limit, self.side))
        return make(await self.context.prompts.text(given, self.special, "input", self.limit, self.side))


def _read_then(make: Callable[[Any], T], read: Callable[[str], Any], i: int, url: str) -> T:
    try:
        prompt = read(url)
    except ValueError as error:
        raise ApiError(400, f"input {i} is {error}", "input") from error
    return make(prompt)


def _part(given: str) -> str | dict[str, Any]:
    """The content part of an image or video that is given as a data URL, or an image in base64; other text as it is."""
    if not given.startswith("data:"):
        try:
            if len(base64.b64decode(given[:64], validate=True)) < 48:
                return given
        except ValueError:
            return given
        given = f"data:;base64,{given}"
    field = "video_url" if given.startswith("data:video/") else "image_url"
    return {"type": field, field: {"url": given}}


def _image(url: str) -> Any:
    """The PIL image of a data URL. Raises ValueError, whose message continues "input 0 is"."""
    return decode(_bytes(_data(url, "image_url")))


def _clip(url: str) -> list[Any] | bytes:
    """The frames of a data URL, or the bytes of a file, such as MP4. Raises ValueError as _image does."""
    return _video(url) if url.startswith("data:video/jpeg") else _bytes(_data(url, "video_url"))


def _video(url: str) -> list[Any]:
    """The frames of a data URL, which vLLM separates by commas. Raises ValueError as _image does."""
    return decode_frames(map(_bytes, _data(url, "video_url").split(",")))


def _data(url: str, field: str) -> str:
    """The text behind the first comma of a data URL in base64."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        raise ValueError(
            f"not a data URL, and this server downloads nothing: {field}.url begins with {url[:32]!r}"
        )
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"not a data URL in base64: it begins with {head[:64]!r}")
    return data


def _bytes(data: str) -> bytes:
    try:
        return base64.b64decode("".join(data.split()), validate=True)  # encoders break lines
    except ValueError as error:
        raise ValueError(f"not base64 behind the comma: {error}") from error


def usage(outputs: list[Any]) -> dict[str, int]:
    """The tokens of all inputs."""
    tokens = sum(o.num_tokens for o in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _base64(vector: np.ndarray) -> str:
    """OpenAI's form: little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
