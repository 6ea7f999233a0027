"""The route of models that segment: classes of points of clouds, or masks of what prompts name or mark in images."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import CloudsRequest, PoolingRequest
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import Inputs, _base64, results, several, usage
from fastkernels.engine.objects import marks
from fastkernels.engine.objects.marks import MOST_POINTS
from fastkernels.engine.objects.segmentation import (
    MASK_THRESHOLD,
    MOST_BOXES,
    MOST_CHARACTERS,
    THRESHOLD,
    ClipOutput,
)
from fastkernels.engine.sampling.pooling import PoolingParams

MOST_TEXTS = 64  # of a request
MOST_MARKS = 64  # objects of a request
Text = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Box = Annotated[list[float], Field(min_length=4, max_length=4)]


class Segmentation:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/segmentations", "segmentations", schema.SEGMENTATION),)

    def __init__(self, context: Context):
        self.context = context

    async def segmentations(self, body: CloudsRequest, raw: Request) -> Response:
        """The class of each point of each cloud; or its probabilities, logits or features."""
        self.context.check_model(body.model)
        clouds, most = body.clouds, self.context.llm.config.max_waiting
        if not clouds:
            raise ApiError(400, "inputs must have at least one cloud", "inputs")
        if len(clouds) > most:
            raise ApiError(400, f"{len(clouds)} inputs are more than the queue holds, {most}", "inputs")
        own = uuid.uuid4().hex
        params = PoolingParams("classify", use_activation=body.output != "logits")

        async def request(i: int, cloud: Any) -> Any:
            make = partial(self.context.llm.make_request, f"{own}-{i}", cloud, params, body.priority or 0)
            try:
                return await asyncio.to_thread(make)  # sorts all points
            except ValueError as error:
                message = str(error).replace("the input", f"input {i}", 1)
                raise ApiError(400, message, "inputs") from error

        requests = await several(request, clouds)
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        answer = {
            "id": f"segmentations-{own}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name,
            "data": [self._entry(i, output.outputs, body) for i, output in enumerate(found)],
            "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    def _entry(self, i: int, found: Any, body: CloudsRequest) -> dict[str, Any]:
        headless = found.items is None
        output = body.output or ("features" if headless else "labels")
        if headless != (output == "features"):
            can = "'features'" if headless else "'labels', 'probabilities' and 'logits'"
            raise ApiError(
                400, f"output {output!r} is not possible: {self.context.model_name!r} has {can}", "output"
            )
        if np.isnan(found.data).any():
            raise ApiError(
                400, f"the result of input {i} is NaN: its numbers are too large for the model", "inputs"
            )
        entry = {"index": i, "object": "segmentation", "labels": found.item_ids, "data": None}
        if output != "labels":
            as_text = body.encoding_format == "base64"
            entry["data"] = _base64(found.data) if as_text else found.data.tolist()
        return entry


class ObjectMarks(BaseModel):
    """Marks of one object in the image."""

    model_config = ConfigDict(extra="forbid", strict=True)

    points: list[list[float]] | None = Field(
        None, max_length=MOST_POINTS, description=f"x and y of each in pixels, at most {MOST_POINTS}."
    )
    point_labels: list[Literal[0, 1]] | None = Field(
        None,
        max_length=MOST_POINTS,
        description="Of each point: 1, in the object, or 0, outside (default: all 1).",
    )
    box: Box | None = Field(None, description="Around the object: left, top, right and bottom in pixels.")
    mask: dict[str, Any] | None = Field(
        None, description="A mask of it in COCO's form and the image's size, as answers have them."
    )


class ImageSegmentationRequest(PoolingRequest):
    """Find what a text or boxes name, or marks point to, in images: data URLs, base64, or parts of type image_url.

    Of videos, content parts of type video_url, objects are followed through the frames; texts are then sought together.
    """

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)] | None = Field(
        None, description="A short phrase that names the objects, or a list, each for each image."
    )
    boxes: Annotated[list[Box], Field(max_length=MOST_BOXES)] | None = Field(
        None, description="Examples in the one image: left, top, right and bottom in its pixels."
    )
    box_labels: Annotated[list[Literal[0, 1]], Field(max_length=MOST_BOXES)] | None = Field(
        None, description="Of each box: 1, wanted, or 0, not wanted (default: all 1)."
    )
    marks: list[ObjectMarks] | None = Field(
        None,
        min_length=1,
        max_length=MOST_MARKS,
        description="Points, a box or a mask of each object in the one image, instead of texts and boxes.",
    )
    multimask_output: bool | None = Field(
        True, description="Of marks: all masks that they can mean; false: the likeliest one."
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description=f"The least score of an object (default: {THRESHOLD}; of marks: 0)."
    )
    mask_threshold: float | None = Field(
        MASK_THRESHOLD, ge=0, le=1, description="The probability above which a pixel belongs to an object."
    )
    max_detections: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Of an image and a text, the best ones (default: all that the model gives).",
    )
    masks: bool | None = Field(True, description="Whether each object has a mask.")
    semantic: bool | None = Field(False, description="Also one mask of all objects.")

    @property
    def texts(self) -> list[str | None]:
        """The texts one by one; None for boxes alone."""
        return list(self.text) if isinstance(self.text, list) else [self.text]


class Rle(BaseModel):
    size: list[int]
    counts: str


class SegmentedImage(BaseModel):
    index: int
    object: Literal["segmentation"]
    text: str
    boxes: list[list[float]]
    scores: list[float]
    labels: list[str]
    masks: list[Rle] | None
    semantic: Rle | None
    presence: float | None
    size: list[int]


class SegmentedFrame(BaseModel):
    object_ids: list[int]
    boxes: list[list[float]]
    scores: list[float]
    labels: list[str]
    masks: list[Rle] | None


class SegmentedVideo(BaseModel):
    index: int
    object: Literal["segmentation"]
    texts: list[str]
    frames: list[SegmentedFrame]
    size: list[int]


class SegmentedImages(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[SegmentedImage | SegmentedVideo]
    usage: schema.EmbeddingUsage


class ImageSegmentation:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/segmentations", "segmentations", schema.answers(SegmentedImages)),)

    def __init__(self, context: Context):
        self.context = context

    async def segmentations(self, body: ImageSegmentationRequest, raw: Request) -> Response:
        """Boxes, scores and masks of the objects, of each image with each text, the best first."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        if not engine.segments:
            raise ApiError(
                404,
                f"/v1/segmentations is not available: {self.context.model_name!r} finds no objects that a prompt names",
                "model",
            )
        requests = await self._requests(body)
        found = await results(self.context, [request for _, request in requests], raw)
        if found is None:
            return Response(status_code=499)
        numbers = [i for i, _ in requests]
        body_of = partial(self._answer, numbers, found)
        return Response(await asyncio.to_thread(body_of), media_type="application/json")  # masks can be many

    def _answer(self, numbers: list[int], found: list[Any]) -> bytes:
        """The answer in JSON. numbers: of the images."""
        data = [
            {"index": i, "object": "segmentation", **_found(o.outputs), "size": list(o.outputs.size)}
            for i, o in zip(numbers, found, strict=True)
        ]
        answer = {
            "id": f"segmentations-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name, "data": data, "usage": usage(found),
        }  # fmt: skip
        return to_json(answer)

    async def _requests(self, body: ImageSegmentationRequest) -> list[tuple[int, Any]]:
        """(number of the image, request) of each image with each text. Raises ApiError, before images are decoded."""
        images, most = body.inputs, self.context.llm.config.max_waiting
        targets, what = self._targets(body)
        if len(images) * len(targets) > most:
            raise ApiError(
                400,
                f"{len(images)} images with {len(targets)} {what} are more than the queue holds, {most}",
                "input",
            )
        field = "marks" if body.marks else "boxes"
        if getattr(body, field) and len(images) > 1:
            raise ApiError(
                400, f"{field} belong to one image, got {len(images)} images: send a request for each", field
            )
        params = PoolingParams(
            "segment", threshold=body.threshold, max_detections=body.max_detections,
            mask_threshold=body.mask_threshold, masks=body.masks is not False, semantic=body.semantic is True,
            multimask_output=body.multimask_output is not False,
        )  # fmt: skip
        read, own = Inputs(self.context), uuid.uuid4().hex

        async def of_image(i: int, given: Any) -> list[tuple[int, Any]]:
            image = await read(i, given)
            made: list[tuple[int, Any]] = []
            prompts: list[dict[str, Any]]
            if isinstance(image, (list, bytes)):
                prompts, wanted = [{"video": image, "text": body.texts}], _of_video(body)
            else:
                prompts, wanted = [{"image": image, **target} for target in targets], params
            for j, prompt in enumerate(prompts):
                make = partial(
                    self.context.llm.make_request, f"{own}-{i}-{j}", prompt, wanted, body.priority or 0
                )
                try:
                    made.append((i, await asyncio.to_thread(make)))  # resizing an image takes milliseconds
                except ValueError as error:
                    message = str(error)
                    field = message.partition(" ")[0].partition("[")[0]
                    if body.marks and field in marks.FIELDS:
                        raise ApiError(400, f"marks[{j}]: {message}", "marks") from error
                    if field in ("text", "boxes", "box_labels", "semantic", "multimask_output"):
                        raise ApiError(400, message, field) from error
                    raise ApiError(400, message.replace("the prompt", f"input {i}", 1), "input") from error
            return made

        return [one for own_requests in await several(of_image, images) for one in own_requests]

    def _targets(self, body: ImageSegmentationRequest) -> tuple[list[dict[str, Any]], str]:
        """(fields of the prompts for an image, their name). Raises ApiError."""
        engine: Any = self.context.llm.engine
        if body.marks is None:
            if not engine.names:
                raise ApiError(
                    400,
                    f"marks are missing: {self.context.model_name!r} finds what points, a box or a mask mark",
                    "marks",
                )
            boxes = (
                {}
                if body.boxes is None and body.box_labels is None
                else {"boxes": body.boxes, "box_labels": body.box_labels}
            )
            return [{"text": text, **boxes} for text in body.texts], "texts"
        if not engine.marks:
            raise ApiError(
                400,
                f"marks are not possible: {self.context.model_name!r} finds what texts and boxes name",
                "marks",
            )
        for field in ("text", "boxes", "box_labels"):
            if getattr(body, field) is not None:
                raise ApiError(400, f"{field} and marks exclude each other: send a request for each", field)
        found = [own.model_dump(exclude_none=True) for own in body.marks]
        if {} in found:
            message = f"marks[{found.index({})}]: points are missing: an object has points, a box or a mask"
            raise ApiError(400, message, "marks")
        return found, "marks"


def _found(outputs: Any) -> dict[str, Any]:
    """The fields of an image with a text, or of a video."""
    if isinstance(outputs, ClipOutput):
        frames = [
            {
                "object_ids": o.object_ids,
                "boxes": o.boxes,
                "scores": o.scores,
                "labels": o.labels,
                "masks": o.rles,
            }
            for o in outputs.frames
        ]
        return {"texts": outputs.texts, "frames": frames}
    return {
        "text": outputs.text, "boxes": outputs.boxes, "scores": outputs.scores, "labels": outputs.labels,
        "masks": outputs.rles, "semantic": outputs.semantic_rle, "presence": outputs.presence,
    }  # fmt: skip


def _of_video(body: ImageSegmentationRequest) -> PoolingParams:
    """The settings of a video, whose thresholds are the model's own. Raises ApiError for those of images."""
    fields = (
        "boxes",
        "box_labels",
        "marks",
        "multimask_output",
        "mask_threshold",
        "max_detections",
        "semantic",
    )
    for field in fields:
        own = getattr(body, field)
        if (
            field in body.model_fields_set
            and own is not None
            and own != type(body).model_fields[field].default
        ):
            raise ApiError(400, f"{field} applies to images, not to a video: leave it out", field)
    return PoolingParams("segment", threshold=body.threshold, masks=body.masks is not False)
