"""Schema of the answer for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from fastkernels.engine.http.answers.schema import PromptTokensDetails, answers


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputItem(BaseModel):
    """A message, a function call, or reasoning, with the fields of its type."""

    model_config = {"extra": "allow"}

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseBody(BaseModel):
    model_config = {"extra": "allow"}

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[OutputItem]
    usage: ResponseUsage


RESPONSES: dict[str, Any] = answers(ResponseBody, stream=True)
