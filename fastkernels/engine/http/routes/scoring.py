"""Routes of scores: vLLM's /score, and reranking as Jina and Cohere have it."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine import scoring
from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import RerankRequest, ScoreRequest
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import check_finite, results, usage
from fastkernels.engine.sampling.pooling import PoolingParams


class Scoring:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (
        *((path, "score", schema.SCORES) for path in ("/score", "/v1/score")),
        *((path, "rerank", schema.RERANKING) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    )

    def __init__(self, context: Context):
        self.context = context

    async def score(self, body: ScoreRequest, raw: Request) -> Response:
        """The score of each document for its query."""
        found = await self._scores(body, raw)
        if found is None:
            return Response(status_code=499)
        scores, tokens = found
        check_finite(scores, "document", self.context)
        answer = {
            "id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.context.model_name,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": tokens,
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    async def rerank(self, body: RerankRequest, raw: Request) -> Response:
        """The documents with their scores, best first."""
        found = await self._scores(body, raw)
        if found is None:
            return Response(status_code=499)
        scores, tokens = found
        check_finite(scores, "document", self.context)
        documents = body.sides[1]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        ranked: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if body.return_documents is not False:
            for one in ranked:
                one["document"] = {"text": documents[one["index"]], "multi_modal": None}
        answer = {
            "id": f"score-{uuid.uuid4().hex}", "model": self.context.model_name, "usage": tokens, "results": ranked,
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    async def _scores(
        self, body: ScoreRequest | RerankRequest, raw: Request
    ) -> tuple[list[float], dict[str, int]] | None:
        """(scores, usage); None if the client has gone. Raises ApiError."""
        self.context.check_model(body.model)
        engine: Any = self.context.llm.engine
        queries, documents = body.sides
        try:
            matched, how = scoring.pairs(queries, documents), engine.scored_by
        except ValueError as error:
            raise ApiError(400, str(error), "documents") from error
        waiting = self.context.llm.config.max_waiting
        if len(queries) + len(documents) > waiting:
            message = f"{len(queries) + len(documents)} texts are more than the queue holds, {waiting}"
            raise ApiError(400, message, "documents")
        texts = Texts(self.context, body)
        queries = [await texts.cut(q, body.max_tokens_per_query, "max_tokens_per_query") for q in queries]
        documents = [await texts.cut(d, body.max_tokens_per_doc, "max_tokens_per_doc") for d in documents]
        if how == "cross-encoder":
            params = PoolingParams("classify", use_activation=body.use_activation)
            pairs = [await texts.pair(queries[q], documents[d], d, params) for q, d in matched]
            found = await results(self.context, pairs, raw)
            return None if found is None else ([o.outputs.score for o in found], usage(found))
        late = how == "late-interaction"
        if body.use_activation is False and late:
            raise ApiError(
                400, "use_activation must be true: MaxSim compares vectors of length 1", "use_activation"
            )
        role = ("query", "document") if late else ("", "")
        task = "token_embed" if late else "embed"
        asked = [
            await texts.one(q, "query", i, PoolingParams(task, role=role[0])) for i, q in enumerate(queries)
        ]
        given = [
            await texts.one(d, "document", i, PoolingParams(task, role=role[1]))
            for i, d in enumerate(documents)
        ]
        if not late:
            found = await results(self.context, [*asked, *given], raw)
            if found is None:
                return None
            first, second = found[: len(asked)], found[len(asked) :]
            scores = [
                scoring.cosine(first[q].outputs.data, second[d].outputs.data).item() for q, d in matched
            ]
            return scores, usage(found)
        vectors = await results(self.context, asked, raw)
        if vectors is None:
            return None
        for (q, _), request in zip(matched, given, strict=True):
            request.params = PoolingParams("maxsim", role="document", query=vectors[q].outputs.data)
        found = await results(self.context, given, raw)
        return None if found is None else ([o.outputs.score for o in found], usage([*vectors, *found]))


class Texts:
    """Requests of the texts of one body. Raises ApiError."""

    def __init__(self, context: Context, body: ScoreRequest | RerankRequest):
        self.context, self.side, self.priority = context, body.truncation_side, body.priority or 0
        self.limit = context.prompt_limit(body.truncate_prompt_tokens, 0)
        self._id = uuid.uuid4().hex

    async def cut(self, text: str, limit: int | None, field: str) -> str:
        """The text, or its first `limit` tokens."""
        if not limit:
            return text
        longest = self.context.llm.engine.max_model_len
        if limit >= longest:
            raise ApiError(400, f"{field} must be less than the maximum input length of {longest} tokens, got {limit}",
                           field)  # fmt: skip
        return await self.context.prompts.shortened(text, limit)

    async def one(self, text: str, kind: str, index: int, params: PoolingParams) -> Any:
        """A request of one text. kind: 'query' or 'document', for messages."""
        ids = await self.context.prompts.text(text, True, "documents", self.limit, self.side)
        return self._made(f"{kind} {index}", f"{kind[0]}{index}", ids, params)

    async def pair(self, query: str, document: str, index: int, params: PoolingParams) -> Any:
        """A cross-encoder's request of two texts."""
        ids, types = await self.context.prompts.pair(query, document, self.limit, self.side)
        return self._made(f"document {index} with its query", f"d{index}", ids, params, token_type_ids=types)

    def _made(self, name: str, key: str, ids: list[int], params: PoolingParams, **more: Any) -> Any:
        try:
            return self.context.llm.make_request(f"{self._id}-{key}", ids, params, self.priority, **more)
        except ValueError as error:
            raise ApiError(400, str(error).replace("the prompt", name, 1), "documents") from error
