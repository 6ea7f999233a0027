"""The route of models of point clouds: classes, or numbers, of the points of clouds."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http import schema
from fastkernels.engine.http.context import Context
from fastkernels.engine.http.embeddings import _base64, results, usage
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.protocol import CloudsRequest
from fastkernels.engine.scheduling.encoding import PoolingParams


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
        requests, own = [], uuid.uuid4().hex
        params = PoolingParams("classify", use_activation=body.output != "logits")
        for i, cloud in enumerate(clouds):
            make = partial(self.context.llm.make_request, f"{own}-{i}", cloud, params, body.priority or 0)
            try:
                requests.append(await asyncio.to_thread(make))  # sorts all points
            except ValueError as error:
                message = str(error).replace("the input", f"input {i}", 1)
                raise ApiError(400, message, "inputs") from error
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
