"""The routes /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from fastkernels.engine.http.anthropic_api import schema
from fastkernels.engine.http.anthropic_api.answer import MessagesAnswer
from fastkernels.engine.http.anthropic_api.conversation import chat_body
from fastkernels.engine.http.anthropic_api.protocol import CountTokensRequest, MessagesRequest
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import ChatCompletionRequest
from fastkernels.engine.http.routes.generation import Generation, Plan


class Messages(Generation):
    PATHS = (
        ("/v1/messages", "messages", schema.MESSAGES),
        ("/v1/messages/count_tokens", "count_tokens", schema.COUNT),
    )

    async def messages(self, body: MessagesRequest, raw: Request) -> Response:
        plan = await self._planned(body)
        answer = MessagesAnswer(
            self._id("msg", plan.body, raw), self.context.model_name, plan.body, plan.prompt,
            self._spell(plan.body), plan.make_parser,
        )  # fmt: skip
        return await self._answer(answer, plan.body, raw, plan.schema)

    async def count_tokens(self, body: CountTokensRequest) -> dict[str, Any]:
        return {"input_tokens": len((await self._planned(body)).prompt.token_ids)}

    async def _planned(self, body: CountTokensRequest) -> Plan:
        self.context.check_model(body.model)
        try:
            return await self._plan(ChatCompletionRequest.model_validate(chat_body(body)))
        except ValidationError as error:
            raise RequestValidationError(
                [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
            ) from error
        except ApiError as error:  # without the number of a message: the chat's messages are others
            message = re.sub(r"messages\[\d+\]", "messages", str(error.detail))
            raise ApiError(error.status_code, message, error.param) from error
