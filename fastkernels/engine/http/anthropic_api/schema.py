"""Schemas of the answers for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from fastkernels.engine.http.answers.schema import answers


class MessagesError(BaseModel):
    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    type: Literal["error"]
    error: MessagesError


class MessagesUsage(BaseModel):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class ContentBlock(BaseModel):
    """Text, thinking or a tool use, with the fields of its type."""

    model_config = {"extra": "allow"}

    type: Literal["text", "thinking", "tool_use"]


class MessagesAnswerBody(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    input_tokens: int


MESSAGES: dict[str, Any] = answers(MessagesAnswerBody, stream=True, error=MessagesErrorResponse)
COUNT: dict[str, Any] = answers(TokenCount, error=MessagesErrorResponse)
