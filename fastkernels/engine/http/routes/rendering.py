"""The route of scenes: images from cameras."""

from __future__ import annotations

import asyncio
import base64
import io
import time
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import INT64, Body, Strict
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results, several
from fastkernels.engine.http.routes.pictures import check_sides
from fastkernels.engine.scheduling.rendering import RenderParams, RenderRequestOutput

Numbers3 = Annotated[list[float], Field(min_length=3, max_length=3)]
Matrix3 = Annotated[list[Numbers3], Field(min_length=3, max_length=3)]
Matrix4 = Annotated[
    list[Annotated[list[float], Field(min_length=4, max_length=4)]], Field(min_length=4, max_length=4)
]
Format = Literal["png", "jpeg", "webp", "raw"]


class CameraFields(Strict):
    """A pinhole camera with OpenCV's axes: x to the right, y down, z forward."""

    width: int = Field(ge=1, le=INT64, description="Pixels; at most the server's --max-pixels with height.")
    height: int = Field(ge=1, le=INT64)
    K: Matrix3 = Field(description="Intrinsics in pixels: [[fx, 0, cx], [0, fy, cy], [0, 0, 1]].")
    viewmat: Matrix4 | None = Field(None, description="World to camera.")
    pose: Matrix4 | None = Field(None, description="Camera to world, in place of viewmat.")
    background: Numbers3 | None = Field(None, description="Red, green and blue from 0 to 1; default black.")


class RenderBody(Body):
    """Images of a scene as cameras see it."""

    cameras: CameraFields | list[CameraFields]
    output_format: Format | None = Field(
        "png", description="raw: float32, little-endian, [height, width, 4] with opacity; not clamped."
    )
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")


class RenderedImage(BaseModel):
    index: int
    object: Literal["image"]
    width: int
    height: int
    b64_json: str


class RenderedImages(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    output_format: Format
    data: list[RenderedImage]


class Rendering:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/render", "render", schema.answers(RenderedImages)),)

    def __init__(self, context: Context):
        self.context = context

    async def render(self, body: RenderBody, raw: Request) -> Response:
        """One image for each camera, in base64."""
        self.context.check_model(body.model)
        given, most = body.cameras, self.context.llm.config.max_waiting
        cameras = given if isinstance(given, list) else [given]
        if not cameras:
            raise ApiError(400, "cameras must have at least one camera", "cameras")
        if len(cameras) > most:
            raise ApiError(400, f"{len(cameras)} cameras are more than the queue holds, {most}", "cameras")
        kind, quality = body.output_format or "png", body.output_compression
        if quality is not None and kind in ("png", "raw"):
            raise ApiError(
                400, "output_compression needs output_format 'jpeg' or 'webp'", "output_compression"
            )
        params, own, requests = RenderParams(raw=kind == "raw"), uuid.uuid4().hex, []
        for i, camera in enumerate(cameras):
            check_sides(kind, camera.width, camera.height, "cameras")
            try:
                made = self.context.llm.make_request(
                    f"{own}-{i}", camera.model_dump(), params, body.priority or 0
                )
            except ValueError as error:
                raise ApiError(400, f"camera {i}: {error}", "cameras") from error
            requests.append(made)
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        data = await several(lambda i, o: asyncio.to_thread(_encoded, i, o, kind, quality), found)
        answer = {
            "id": f"render-{own}", "object": "list", "created": int(time.time()), "model": self.context.model_name,
            "output_format": kind, "data": data,
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")


def _encoded(i: int, output: RenderRequestOutput, kind: str, quality: int | None) -> dict[str, Any]:
    if kind == "raw":
        data = np.ascontiguousarray(output.array, "<f4").tobytes()
    else:
        # zlib's lowest level: a PNG of 1920 x 1080 in a fifth of the time, a tenth larger
        options: dict[str, Any] = {"compress_level": 1} if kind == "png" else {}
        file = io.BytesIO()
        output.image.save(file, kind, **(options if quality is None else {"quality": quality}))
        data = file.getvalue()
    height, width = output.array.shape[:2]
    text = base64.b64encode(data).decode()
    return {"index": i, "object": "image", "width": width, "height": height, "b64_json": text}
