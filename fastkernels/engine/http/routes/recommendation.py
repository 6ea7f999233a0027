"""The route of recommenders: scores of samples."""

from __future__ import annotations

import time
import uuid

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import SamplesRequest
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results, usage
from fastkernels.engine.sampling.pooling import PoolingParams


class Recommendation:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/scores", "scores", schema.RECOMMENDATION),)

    def __init__(self, context: Context):
        self.context = context

    async def scores(self, body: SamplesRequest, raw: Request) -> Response:
        """The scores of each sample; with the ids of the items that it has chosen, if any."""
        self.context.check_model(body.model)
        samples, most = body.samples, self.context.llm.config.max_waiting
        if not samples:
            raise ApiError(400, "inputs must have at least one sample", "inputs")
        if len(samples) > most:
            raise ApiError(400, f"{len(samples)} inputs are more than the queue holds, {most}", "inputs")
        params, own = PoolingParams("classify", use_activation=body.use_activation), uuid.uuid4().hex
        requests = []
        for i, sample in enumerate(samples):
            try:
                made = self.context.llm.make_request(f"{own}-{i}", sample, params, body.priority or 0)
            except ValueError as error:
                message = str(error).replace("the input", f"input {i}", 1)
                raise ApiError(400, message, "inputs") from error
            requests.append(made)
        found = await results(self.context, requests, raw)
        if found is None:
            return Response(status_code=499)
        for i, output in enumerate(found):
            if np.isnan(output.outputs.data).any():
                raise ApiError(
                    400, f"the score of input {i} is NaN: its numbers are too large for the model", "inputs"
                )
        data = [
            {"index": i, "object": "scores", "scores": o.outputs.scores, "items": o.outputs.item_ids}
            for i, o in enumerate(found)
        ]
        answer = {
            "id": f"scores-{own}", "object": "list", "created": int(time.time()), "model": self.context.model_name,
            "data": data, "usage": usage(found),
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")
