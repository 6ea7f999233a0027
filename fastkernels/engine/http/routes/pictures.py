"""OpenAI's routes for images from text, and from an image and text, of diffusion pipelines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, model_validator
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.responses import event
from fastkernels.engine.http.answers.streaming import EventStream
from fastkernels.engine.http.requests.errors import ApiError, error_body
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.requests.unserved import field_error
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results, several
from fastkernels.engine.http.routes.jobs import checked
from fastkernels.engine.inputs.images import decode
from fastkernels.engine.scheduling.denoising import ImageParams

Format = Literal["png", "jpeg", "webp"]
SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
SIZE_SCHEMA = {
    "anyOf": [{"const": "auto"}, {"type": "string", "pattern": f"^{SIZE.pattern}$"}, {"type": "null"}]
}
MOST_SIDE = {"webp": 16_383, "jpeg": 65_500}  # pixels of a side that the format can store
# The fields of ImageParams by the names that clients know
_FIELDS = {"height": "size", "width": "size"}
MOST_FIELDS, MOST_FILES = 32, 17  # of a form; OpenAI's client sends up to 16 images and a mask
_NUMBERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        ("n", "seed", "num_inference_steps", "output_compression", "priority", "partial_images"), int
    ),
    **dict.fromkeys(("guidance_scale", "strength", "step_cache"), float),
}
_FLAGS = {"true": True, "false": False}


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
    step_cache: float | None = Field(
        None,
        gt=0,
        le=1,
        description="The threshold of steps that reuse the last output (default: none does).",
    )
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")
    # OpenAI's, with the values that change nothing
    background: Literal["auto", "opaque"] | None = "auto"
    quality: Literal["auto", "standard"] | None = "auto"
    moderation: Literal["auto", "low"] | None = "auto"
    style: None = None
    stream: bool | None = Field(False, description="An event for each image, when it is complete.")
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
            self.n or 1, height, width, self.num_inference_steps, self.guidance_scale, self.negative_prompt, self.seed,
            step_cache=self.step_cache,
        )  # fmt: skip


class ImageEditRequest(ImageGenerationRequest):
    """The fields of a form, in which the file `image` is, too: those of images from text, and strength."""

    strength: float | None = Field(
        None, gt=0, le=1, description="How much of the schedule the image goes through."
    )
    # OpenAI's, with the values that change nothing
    input_fidelity: Literal["low"] | None = "low"

    def image_params(self) -> ImageParams:
        return replace(super().image_params(), strength=self.strength)


class Picture(BaseModel):
    b64_json: str
    seed: int
    steps_reused: int | None = None


class PictureList(BaseModel):
    created: int
    data: list[Picture]
    output_format: Format
    size: str


def _of_form(form: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments of a route that reads a form with an image."""
    properties = form.model_json_schema()["properties"]
    file = {"type": "string", "format": "binary", "description": "A PNG, JPEG, WEBP, GIF or BMP file."}
    body = {
        "type": "object", "required": ["image", "prompt"], "properties": {"image": file, **properties},
        "additionalProperties": False,
    }  # fmt: skip
    content = {"multipart/form-data": {"schema": body}}
    return {
        **schema.answers(PictureList),
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


class Pictures:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (
        ("/v1/images/generations", "generate", schema.answers(PictureList)),
        ("/v1/images/edits", "edit", _of_form(ImageEditRequest)),
    )

    def __init__(self, context: Context):
        self.context = context

    async def generate(self, body: ImageGenerationRequest, raw: Request) -> Response:
        """Images of a prompt, in base64."""
        return await self._answer(body, body.prompt, raw)

    async def edit(self, raw: Request) -> Response:
        """Images of a prompt and an image, in base64. The body is a form, as OpenAI's client sends it."""
        files: list[bytes] = []
        body: ImageEditRequest = await checked(ImageEditRequest, _form(raw, files))
        try:
            image = await asyncio.to_thread(decode, files[0])
        except ValueError as error:
            raise ApiError(400, f"image is {error}", "image") from error
        return await self._answer(body, {"prompt": body.prompt, "image": image}, raw)

    async def _answer(self, body: ImageGenerationRequest, prompt: Any, raw: Request) -> Response:
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        try:
            requests = engine.make_requests(
                f"img-{uuid.uuid4().hex}", prompt, body.image_params(), body.priority or 0
            )
        except ValueError as error:
            message = str(error)
            field = message.replace("the prompt", "prompt", 1).partition(" ")[0]
            raise ApiError(400, message, _FIELDS.get(field, field)) from error
        kind = body.output_format or "png"
        height, width = requests[0].size
        check_sides(kind, width, height, "size")
        if body.stream:
            events = _Events(body, f"{width}x{height}")
            return EventStream(
                events, await self.context.open(requests), self.context.config.stall_timeout, ""
            )
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        data = await several(lambda _, output: asyncio.to_thread(_encoded, output, body), found)
        answer = {
            "created": int(time.time()),
            "data": data,
            "output_format": kind,
            "size": f"{width}x{height}",
        }
        return Response(to_json(answer), media_type="application/json")


async def _form(raw: Request, files: list[bytes]) -> dict[str, Any]:
    """The fields of a form, those that are numbers as such; `files` gets its image. Raises ApiError."""
    if find_spec("python_multipart") is None:
        raise ApiError(
            501, "this server cannot read forms: they need the package python-multipart"
            " (pip install 'fastkernels[audio]')",
        )  # fmt: skip
    found: dict[str, Any] = {}
    async with raw.form(max_files=MOST_FILES, max_fields=MOST_FIELDS) as form:
        for key, value in form.multi_items():
            name = key.removesuffix("[]")
            if isinstance(value, str):
                if name == "image":
                    raise ApiError(400, "image must be a file in the form", "image")
                if name in found:
                    raise ApiError(400, f"{name} is given twice", name)
                found[name] = _number(name, value)
            elif name != "image":
                raise ApiError(400, f"{name} is a file, and only the file image is supported", name)
            elif files:
                raise ApiError(400, "image is given twice, and one image is changed at a time", "image")
            else:
                files.append(await value.read())
    if not files:
        raise ApiError(400, "image is required: a PNG, JPEG, WEBP, GIF or BMP file in the form", "image")
    return found


def _number(name: str, value: str) -> Any:
    """The value of a form's field; a text that is no number is refused by the check of its type."""
    if name == "stream":
        return _FLAGS.get(value, value)
    with contextlib.suppress(ValueError):
        return _NUMBERS.get(name, str)(value)
    return value


def _encoded(output: Any, body: ImageGenerationRequest) -> dict[str, Any]:
    kind, quality = body.output_format or "png", body.output_compression
    options = {} if quality is None or kind == "png" else {"quality": quality}
    file = io.BytesIO()
    output.images[0].save(file, kind, **options)
    made = {"b64_json": base64.b64encode(file.getvalue()).decode(), "seed": output.seeds[0]}
    if body.step_cache is not None:
        made["steps_reused"] = output.steps_reused[0]
    return made


class _Events:
    """OpenAI's events of complete images, for EventStream: `image_generation.completed` or `image_edit.completed`."""

    def __init__(self, body: ImageGenerationRequest, size: str):
        self._body = body
        edits = isinstance(body, ImageEditRequest)
        self._fields = {
            "type": "image_edit.completed" if edits else "image_generation.completed", "size": size,
            "output_format": body.output_format or "png", "background": "opaque", "quality": "auto",
        }  # fmt: skip

    def opening(self) -> bytes:
        return b""

    async def events(self, outputs: Sequence[tuple[int, Any]]) -> bytes:
        ready = [output for _, output in outputs]
        data = await several(lambda _, output: asyncio.to_thread(_encoded, output, self._body), ready)
        made = [
            {**self._fields, "created_at": int(time.time()), "index": i, **entry}
            for (i, _), entry in zip(outputs, data, strict=True)
        ]
        return b"".join(map(event, made))

    def closing(self) -> bytes:
        return b""

    def failed(self, message: str, status: int) -> bytes:
        return event(error_body(message, status))
