"""The route /v1/responses."""

from __future__ import annotations

import re
import uuid
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import ChatCompletionRequest
from fastkernels.engine.http.responses_api import schema
from fastkernels.engine.http.responses_api.answer import ResponseAnswer
from fastkernels.engine.http.responses_api.conversation import messages
from fastkernels.engine.http.responses_api.protocol import ResponsesRequest, TextFormat
from fastkernels.engine.http.routes.generation import Generation

SAME = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "include_reasoning", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "priority", "request_id",
    "chat_template", "chat_template_kwargs", "cache_salt",
)  # fmt: skip


class Responses(Generation):
    PATHS = (("/v1/responses", "responses", schema.RESPONSES),)

    async def responses(self, body: ResponsesRequest, raw: Request) -> Response:
        """One response. Nothing of it is stored."""
        self.context.check_model(body.model)
        try:
            chat = ChatCompletionRequest.model_validate(_chat(body))
        except ValidationError as error:
            raise RequestValidationError(
                [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
            ) from error
        tokenizer = self.context.llm.engine.tokenizer

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False).input_ids)

        try:
            plan = await self._plan(chat)
            answer = ResponseAnswer(
                f"resp_{body.request_id or uuid.uuid4().hex}", self.context.model_name, plan.body, plan.prompt,
                self._spell(plan.body), body, plan.make_parser, count,
            )  # fmt: skip
            return await self._answer(answer, plan.body, raw, plan.schema)
        except ApiError as error:  # by the field's name here
            names = {
                "max_completion_tokens": "max_output_tokens",
                "messages": "input",
                "response_format": "text",
            }
            given = (error.param or "").partition("[")[0]
            name = names.get(given)
            if name is None:
                raise
            # Without the number of a message: the input's items are others.
            message = re.sub(rf"{given}(\[\d+\])?", name, str(error.detail))
            raise ApiError(error.status_code, message, name) from error


def _chat(body: ResponsesRequest) -> dict[str, Any]:
    """The body of the chat completion that this is."""
    chat = {name: getattr(body, name) for name in SAME if name in body.model_fields_set}
    chat["messages"] = messages(body)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = body.tool_choice
    named = isinstance(choice, dict)
    chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    return chat


def _format(wanted: TextFormat) -> dict[str, Any]:
    """The response_format of a chat completion."""
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None:
        raise ApiError(400, "text.format: type json_schema needs a schema", "text")
    given = wanted.model_dump(exclude_none=True, exclude={"type", "json_schema"})
    return {"type": "json_schema", "json_schema": {"name": "answer", **given, "schema": wanted.json_schema}}
