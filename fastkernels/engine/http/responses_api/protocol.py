"""Bodies of requests to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from fastkernels.engine.http.requests.protocol import INT64, Body, CacheSalt, Strict
from fastkernels.engine.http.requests.unserved import field_error
from fastkernels.engine.sampling.sampling_params import MAX_TEMPERATURE

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}
_ITEM = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"role": {"type": "string", "minLength": 1}, "content": _CONTENT},
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call"}, "call_id": {"type": "string"}, "name": {"type": "string"},
                "arguments": {"type": "string"},
            },
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "function_call_output"}, "call_id": {"type": "string"}, "output": _CONTENT,
            },
            "required": ["type", "call_id", "output"],
        },
        {"type": "object", "properties": {"type": {"const": "reasoning"}}, "required": ["type"]},
    ]
}  # fmt: skip
_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 4096},
    ]
}


def _input(value: Any) -> list[dict[str, Any]]:
    """The items of the input; a text is one message of the user."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of items, not empty")
    if len(value) > 4096:
        raise ValueError(f"at most 4096 items are allowed, got {len(value)}")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"item {i} must be an object")
    return value


def _not_served(reason: str, *neutral: Any) -> Any:
    """A field whose only values are null and these."""

    def check(value: Any) -> Any:
        if value is not None and not any(
            value is n or (value == n and type(value) is type(n)) for n in neutral
        ):
            raise ValueError(reason)
        return value

    return Annotated[Any, PlainValidator(check), WithJsonSchema({"enum": [None, *neutral]})]


_NO_STORAGE = "this server stores no responses: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "name": value["name"]}
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


_NAMED_CHOICE = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_CHOICE]}


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


class TextFormat(Strict):
    """schema: with type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Body):
    """OpenAI's fields, and vLLM's additional sampling parameters."""

    model_config = ConfigDict(populate_by_name=True)

    input: Annotated[Any, PlainValidator(_input), WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT64)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = False
    tools: list[FunctionTool] | None = Field(None, max_length=512)
    tool_choice: Annotated[Any, PlainValidator(_tool_choice), WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="reasoning.encrypted_content has no effect: reasoning is never encrypted."
    )
    top_logprobs: int | None = Field(None, ge=0)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    include_reasoning: bool | None = True
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    seed: int | None = Field(None, ge=-(2**63), le=INT64)
    ignore_eos: bool | None = False
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: CacheSalt = None
    chat_template: str | None = Field(
        None, min_length=1, description="Only with the server's --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = Field(None, description="Without effect: nothing is stored.")
    previous_response_id: _not_served(_NO_STORAGE) = None  # type: ignore[valid-type]
    conversation: _not_served(_NO_STORAGE) = None  # type: ignore[valid-type]
    background: _not_served(_NO_STORAGE, False) = None  # type: ignore[valid-type]
    prompt: _not_served("stored prompts are not supported: send the text as input") = None  # type: ignore[valid-type]
    truncation: _not_served(  # type: ignore[valid-type]
        "truncation must be 'disabled': an input that is too long is an error", "disabled"
    ) = None
    max_tool_calls: _not_served(  # type: ignore[valid-type]
        "max_tool_calls is for built-in tools, which this server does not have"
    ) = None
    stream_options: dict[str, bool] | None = Field(None, description="Without effect.")

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", f"top_logprobs needs include to contain {_LOGPROBS!r}")
        return self

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())
