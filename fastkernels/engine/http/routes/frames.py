"""The route of world models: frames that follow from images and actions, streamed as they are made."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.streaming import EventStream
from fastkernels.engine.http.requests.errors import ApiError, error_body
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results
from fastkernels.engine.http.routes.pictures import Format
from fastkernels.engine.inputs.images import decode
from fastkernels.engine.inputs.media import data_of
from fastkernels.engine.scheduling.rollout import FrameParams, FrameRequestOutput

Action = dict[str, float] | list[float]


class FrameGenerationRequest(Body):
    """First frames and actions of a world model. An image is a data URL, or a file in base64."""

    images: str | list[str] = Field(description="The first frames; at most as many as the model sees.")
    actions: list[Action] = Field(
        description="One for each frame to make, at most the server's --max-frames."
    )
    prompt_actions: list[Action] | None = Field(None, description="One for each image.")
    num_inference_steps: int | None = Field(None, ge=1, le=INT64, description="Of each frame.")
    seed: int | None = Field(None, ge=0, le=INT64)
    stream: bool | None = Field(False, description="Send each frame as an event when it is made.")
    response_format: Literal["b64_json"] | None = "b64_json"
    output_format: Format | None = "png"
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")


class Frame(BaseModel):
    index: int
    b64_json: str


class FrameList(BaseModel):
    id: str
    created: int
    model: str
    data: list[Frame]
    output_format: Format
    size: str
    seed: int


class Frames:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/frames", "generate", schema.answers(FrameList, stream=True)),)

    def __init__(self, context: Context):
        self.context = context

    async def generate(self, body: FrameGenerationRequest, raw: Request) -> Response:
        """The frames that follow: one answer, or an event for each frame."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        own = f"frames-{uuid.uuid4().hex}"
        # Images are decoded and resized
        request = await asyncio.to_thread(self._request, own, body)
        height, width = engine.model.size
        head = {
            "id": own, "created": int(time.time()), "model": self.context.model_name,
            "output_format": body.output_format or "png", "size": f"{width}x{height}", "seed": request.seed,
        }  # fmt: skip
        if body.stream:
            outputs = await self.context.open([request])
            return EventStream(FrameEvents(head), outputs, self.context.config.stall_timeout)
        found = await results(self.context, [request], raw)
        if found is None:
            return Response(status_code=499)
        data = await asyncio.to_thread(encoded, found, head["output_format"])
        return Response(to_json({**head, "data": data}), media_type="application/json")

    def _request(self, request_id: str, body: FrameGenerationRequest) -> Any:
        """Raises ApiError."""
        listed = [body.images] if isinstance(body.images, str) else body.images
        engine: Any = self.context.llm.engine
        if not listed:
            raise ApiError(400, "images must have at least one image", "images")
        if len(listed) > (most := max(engine.model.window - 1, 1)):  # before any of them is decoded
            raise ApiError(400, f"images must be at most {most}, got {len(listed)}", "images")
        prompt: dict[str, Any] = {"actions": body.actions, "prompt_actions": body.prompt_actions}
        images = []
        for i, given in enumerate(listed):
            url = given if given.startswith("data:") else f"data:;base64,{given}"
            try:
                data = data_of(url, f"image {i}")
            except ValueError as error:
                raise ApiError(400, str(error), "images") from error
            try:
                images.append(decode(data))
            except ValueError as error:
                raise ApiError(400, f"image {i} is {error}", "images") from error
        params = FrameParams(body.num_inference_steps, body.seed)
        try:
            return engine.make_request(request_id, {**prompt, "images": images}, params, body.priority or 0)
        except ValueError as error:
            message = str(error)
            field = message.partition(" ")[0].partition("[")[0].removesuffix(":")
            raise ApiError(400, message, field) from error


class FrameEvents:
    """The events of EventStream: one a frame, then one with the rest of the answer."""

    def __init__(self, head: dict[str, Any]):
        self._head = head
        self._count = 0

    def opening(self) -> bytes:
        return b""

    async def events(self, outputs: Sequence[tuple[int, FrameRequestOutput]]) -> bytes:
        data = await asyncio.to_thread(encoded, [o for _, o in outputs], self._head["output_format"])
        self._count += len(data)
        return b"".join(_event({"type": "frame", **frame}) for frame in data)

    def closing(self) -> bytes:
        return _event({"type": "completed", "frames": self._count, **self._head}) + b"data: [DONE]\n\n"

    def failed(self, message: str, status: int) -> bytes:
        return _event(error_body(message, status)) + b"data: [DONE]\n\n"


def _event(data: Any) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


def encoded(outputs: Sequence[FrameRequestOutput], kind: str) -> list[dict[str, Any]]:
    """Each frame as {'index': its number, 'b64_json': a file}."""
    made = []
    for output in outputs:
        for i, image in enumerate(output.images):
            file = io.BytesIO()
            image.save(file, kind)
            made.append({"index": output.start + i, "b64_json": base64.b64encode(file.getvalue()).decode()})
    return made
