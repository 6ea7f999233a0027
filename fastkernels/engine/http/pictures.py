"""OpenAI's route for images from text, of diffusion pipelines."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, model_validator
from pydantic_core import to_json

from fastkernels.engine.http import schema
from fastkernels.engine.http.context import Context
from fastkernels.engine.http.embeddings import results
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.protocol import INT64, Body
from fastkernels.engine.http.unserved import field_error
from fastkernels.engine.scheduling.denoising import ImageParams

Format = Literal["png", "jpeg", "webp"]
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
SIZE_SCHEMA = {
    "anyOf": [{"const": "auto"}, {"type": "string", "pattern": f"^{SIZE.pattern}$"}, {"type": "null"}]
}
MOST_SIDE = {"webp": 16_383, "jpeg": 65_500}  # pixels of a side that the format can store
# The fields of ImageParams by the names that clients know
_FIELDS = {"height": "size", "width": "size"}


def check_sides(kind: str, width: int, height: int, about: str) -> None:
    """Raise ApiError for an image that the format cannot store. about: the field that has the size."""
    most = MOST_SIDE.get(kind)
    if most is not None and max(width, height) > most:
        raise ApiError(
            400,
            f"output_format '{kind}' stores at most {most} pixels a side, got {width} x {height}: use 'png'",
            about,
        )


def check_size(value: str | None) -> str | None:
    if value not in (None, "auto") and not SIZE.fullmatch(str(value)):
        raise ValueError('must be "auto" or WIDTHxHEIGHT in pixels, such as "1024x768"')
    return value


class ImageGenerationRequest(Body):
    """OpenAI's images from text, with seed, num_inference_steps, guidance_scale and negative_prompt."""

    prompt: str = Field(min_length=1, max_length=32000)
    n: int | None = Field(1, ge=1, le=INT64, description="At most the server's --max-images.")
    size: Annotated[
        str | None,
        AfterValidator(check_size),
        WithJsonSchema(SIZE_SCHEMA),
    ] = "auto"  # fmt: skip
    response_format: Literal["b64_json"] | None = "b64_json"
    output_format: Format | None = "png"
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp.")
    seed: int | None = Field(None, ge=0, le=INT64, description="Image i uses seed + i.")
    num_inference_steps: int | None = Field(None, ge=1, le=INT64)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    negative_prompt: str | None = Field(None, max_length=32000)
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")
    # OpenAI's, with the values that change nothing
    background: Literal["auto", "opaque"] | None = "auto"
    quality: Literal["auto", "standard"] | None = "auto"
    moderation: Literal["auto", "low"] | None = "auto"
    style: None = None
    stream: Literal[False] | None = False
    partial_images: Literal[0] | None = 0

    @model_validator(mode="before")
    @classmethod
    def _no_url(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("response_format") == "url":
            raise field_error(
                "response_format",
                "response_format 'url' is not supported, since this server stores no images; it may be 'b64_json'",
            )
        return data

    @model_validator(mode="after")
    def _compressible(self) -> ImageGenerationRequest:
        if self.output_compression not in (None, 100) and self.output_format in (None, "png"):
            raise field_error("output_compression", "output_compression needs output_format 'jpeg' or 'webp'")
        return self

    def image_params(self) -> ImageParams:
        """Raises ValueError, whose message begins with the field of ImageParams."""
        found = SIZE.fullmatch(self.size or "")
        width, height = (None, None) if found is None else map(int, found.groups())
        return ImageParams(
            self.n or 1, height, width, self.num_inference_steps, self.guidance_scale, self.negative_prompt, self.seed
        )  # fmt: skip


class Picture(BaseModel):
    b64_json: str
    seed: int


class PictureList(BaseModel):
    created: int
    data: list[Picture]
    output_format: Format
    size: str


class Pictures:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/images/generations", "generate", schema.answers(PictureList)),)

    def __init__(self, context: Context):
        self.context = context

    async def generate(self, body: ImageGenerationRequest, raw: Request) -> Response:
        """Images of a prompt, in base64."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        try:
            requests = engine.make_requests(
                f"img-{uuid.uuid4().hex}", body.prompt, body.image_params(), body.priority or 0
            )
        except ValueError as error:
            message = str(error)
            field = message.replace("the prompt", "prompt", 1).partition(" ")[0]
            raise ApiError(400, message, _FIELDS.get(field, field)) from error
        kind = body.output_format or "png"
        height, width = requests[0].size
        check_sides(kind, width, height, "size")
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        data = await asyncio.to_thread(_encoded, found, kind, body.output_compression)
        answer = {
            "created": int(time.time()),
            "data": data,
            "output_format": kind,
            "size": f"{width}x{height}",
        }
        return Response(to_json(answer), media_type="application/json")


def _encoded(outputs: Sequence[Any], kind: str, quality: int | None) -> list[dict[str, Any]]:
    options = {} if quality is None or kind == "png" else {"quality": quality}
    made = []
    for output in outputs:
        file = io.BytesIO()
        output.images[0].save(file, kind, **options)
        made.append({"b64_json": base64.b64encode(file.getvalue()).decode(), "seed": output.seeds[0]})
    return made
