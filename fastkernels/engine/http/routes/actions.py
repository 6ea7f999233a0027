"""The route of robot policies: chunks of actions for observations."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results, several, usage
from fastkernels.engine.inputs.media import data_of
from fastkernels.engine.scheduling.acting import ActionParams


class ActionsRequest(Body):
    """The observations of robots, whose fields depend on the model."""

    inputs: dict[str, Any] | list[dict[str, Any]]
    num_actions: int | None = Field(None, ge=1, le=INT64, description="At most the model's chunk.")
    num_steps: int | None = Field(None, ge=1, le=INT64, description="Denoising steps.")
    seed: int | None = Field(None, ge=0, le=INT64, description="Input i uses seed + i.")
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="base64: the actions one after the other, float32, little-endian."
    )
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    @property
    def observations(self) -> list[dict[str, Any]]:
        """The observations one by one."""
        return [self.inputs] if isinstance(self.inputs, dict) else self.inputs

    def params(self, i: int) -> ActionParams:
        """Those of input i."""
        seed = None if self.seed is None else (self.seed + i) % (INT64 + 1)
        return ActionParams(self.num_actions, self.num_steps, seed)


class Chunk(BaseModel):
    index: int
    object: Literal["actions"]
    actions: list[list[float]] | str
    shape: tuple[int, int]
    seed: int


class ChunkList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Chunk]
    usage: schema.EmbeddingUsage


class Actions:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/actions", "act", schema.answers(ChunkList)),)

    def __init__(self, context: Context):
        self.context = context

    async def act(self, body: ActionsRequest, raw: Request) -> Response:
        """The next actions for each observation."""
        self.context.check_model(body.model)
        given, most = body.observations, self.context.llm.config.max_waiting
        if not given:
            raise ApiError(400, "inputs must have at least one observation", "inputs")
        if len(given) > most:
            raise ApiError(400, f"{len(given)} inputs are more than the queue holds, {most}", "inputs")
        own = uuid.uuid4().hex
        requests = await several(
            lambda i, one: asyncio.to_thread(self._request, f"{own}-{i}", i, one, body), given
        )
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        for i, output in enumerate(found):
            if not np.isfinite(output.actions).all():
                raise ApiError(
                    400, f"the actions of input {i} are not finite: its numbers are too large for the model",
                    "inputs",
                )  # fmt: skip
        as_text = body.encoding_format == "base64"
        data = [
            {
                "index": i, "object": "actions", "shape": list(o.actions.shape), "seed": o.seed,
                "actions": _base64(o.actions) if as_text else o.actions.tolist(),
            }
            for i, o in enumerate(found)
        ]  # fmt: skip
        answer = {
            "id": f"actions-{own}", "object": "list", "created": int(time.time()), "model": self.context.model_name,
            "data": data, "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    def _request(self, name: str, i: int, given: Mapping[str, Any], body: ActionsRequest) -> Any:
        """The checked request of input i. Raises ApiError."""
        try:
            observation = {**given, "images": _files(given["images"])} if "images" in given else given
            return self.context.llm.make_request(name, observation, body.params(i), body.priority or 0)
        except ValueError as error:
            message = str(error)
            field = message.partition(" ")[0]
            if field in ("num_actions", "num_steps", "seed"):
                raise ApiError(400, message, field) from error
            raise ApiError(400, message.replace("the input", f"input {i}", 1), "inputs") from error


def _files(images: Any) -> Any:
    """The bytes of images that are given as data URLs or base64; other values as they are, for the model to refuse."""
    listed = list(images.values()) if isinstance(images, Mapping) else images
    if isinstance(listed, str):
        listed = [listed]
    return [_file(one, i) for i, one in enumerate(listed)] if isinstance(listed, list) else listed


def _file(given: Any, i: int) -> Any:
    if isinstance(given, Mapping):  # a content part of OpenAI's chat completions
        url = given.get("image_url", given.get("url"))
        given = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(given, str):
        raise ValueError(f"the input has an image {i} that is neither a data URL nor base64")
    try:
        return data_of(
            given if given.startswith(("data:", "http")) else f"data:;base64,{given}", f"image {i}"
        )
    except ValueError as error:
        raise ValueError(f"the input cannot be read: {error}") from error


def _base64(actions: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(actions, "<f4").tobytes()).decode()
