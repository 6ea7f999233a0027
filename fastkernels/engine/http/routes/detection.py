"""The route of detectors: boxes of the objects in images."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import PoolingRequest
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import Inputs, encoded, usage
from fastkernels.engine.objects.detection import THRESHOLD
from fastkernels.engine.sampling.pooling import PoolingParams


class DetectionRequest(PoolingRequest):
    """Detect objects in images, which are data URLs, base64, or content parts of type image_url."""

    threshold: float | None = Field(THRESHOLD, ge=0, le=1, description="The least score of an object.")
    max_detections: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Of an image, the best ones (default: all that the model gives).",
    )


class Detected(BaseModel):
    index: int
    object: Literal["detections"]
    boxes: list[list[float]]
    scores: list[float]
    labels: list[int]
    label_names: list[str]
    size: list[int]


class DetectionList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Detected]
    usage: schema.EmbeddingUsage


class Detection:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/detections", "detect", schema.answers(DetectionList)),)

    def __init__(self, context: Context):
        self.context = context

    async def detect(self, body: DetectionRequest, raw: Request) -> Response:
        """The objects in each image: boxes [left, top, right, bottom] in its pixels, scores and labels, best first."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        if not engine.detects:
            raise ApiError(
                404,
                f"/v1/detections is not available: {self.context.model_name!r} detects no objects",
                "model",
            )
        params = PoolingParams("detect", threshold=body.threshold, max_detections=body.max_detections)
        found = await encoded(self.context, body, params, Inputs(self.context), raw)
        if found is None:
            return Response(status_code=499)
        data = [
            {
                "index": i, "object": "detections", "boxes": o.outputs.boxes, "scores": o.outputs.scores,
                "labels": o.outputs.labels, "label_names": o.outputs.label_names, "size": list(o.outputs.size),
            }
            for i, o in enumerate(found)
        ]  # fmt: skip
        answer = {
            "id": f"detect-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name, "data": data, "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")
