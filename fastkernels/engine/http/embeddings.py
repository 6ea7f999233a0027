"""Routes of encoders: OpenAI's embeddings."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http import schema
from fastkernels.engine.http.context import Context
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.protocol import EmbeddingRequest
from fastkernels.engine.http.streaming import unless_gone
from fastkernels.engine.scheduling.encoding import PoolingParams
from fastkernels.engine.tokenizer import cut


class Embeddings:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/embeddings", "embeddings", schema.EMBEDDINGS),)

    def __init__(self, context: Context):
        self.context = context

    async def embeddings(self, body: EmbeddingRequest, raw: Request) -> Response:
        """One vector for each input."""
        self.context.check_model(body.model)
        requests, own = [], uuid.uuid4().hex
        limit, side = self.context.prompt_limit(body.truncate_prompt_tokens, 0), body.truncation_side
        inputs, params = body.inputs, PoolingParams(dimensions=body.dimensions)
        if len(inputs) > self.context.llm.config.max_waiting:
            raise ApiError(400, f"{len(inputs)} inputs are more than the queue holds", "input")
        for i, given in enumerate(inputs):
            special = body.add_special_tokens is not False
            if isinstance(given, list):
                ids = given if limit is None else cut(given, limit, side)
            else:
                ids = await self.context.prompts.text(given, special, "input", limit, side)
            try:
                request = self.context.llm.make_request(f"{own}-{i}", ids, params, body.priority or 0)
            except ValueError as error:
                message = str(error)
                if message.startswith("dimensions"):
                    raise ApiError(400, message, "dimensions") from error
                raise ApiError(400, message.replace("the prompt", f"input {i}", 1), "input") from error
            requests.append(request)
        outputs = await self.context.open(requests)
        try:
            found = await unless_gone(raw, outputs.rest())
        finally:
            outputs.close()
        if found is None:
            return Response(status_code=499)
        answer = self._answer([output for _, output in sorted(found, key=lambda item: item[0])], body)
        return Response(to_json(answer), media_type="application/json")

    def _answer(self, outputs: list[Any], body: EmbeddingRequest) -> dict[str, Any]:
        as_text = body.encoding_format == "base64"
        tokens = sum(len(o.prompt_token_ids) for o in outputs)
        vectors = [_base64(o.outputs.data) if as_text else o.outputs.embedding for o in outputs]
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.context.model_name, "usage": usage}


def _base64(vector: np.ndarray) -> str:
    """OpenAI's form: little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
