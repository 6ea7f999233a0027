"""Messages of a conversation, as a request has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fastkernels.engine.http.unserved import field_error, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _content(value: Any) -> str | list[dict[str, str]] | None:
    """A message's text, or its parts. Whether the template gets parts or their text is decided in prompts.py."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must be a text, or a list of {"type": "text", "text": ...}')
    return [{"type": "text", "text": part["text"]} for part in parts]


def _arguments(value: Any) -> str | dict[str, Any] | None:
    if value is not None and not isinstance(value, (str, dict)):
        raise ValueError("must be a text that contains a JSON object")
    return value


_PART = {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}  # fmt: skip
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}
_ARGUMENTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}


class CalledFunction(BaseModel):
    """arguments: the text of a JSON object, as the model wrote it. prompts.py reads it."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1, max_length=256)
    arguments: Annotated[Any, PlainValidator(_arguments), WithJsonSchema(_ARGUMENTS_SCHEMA)] = None


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message. Other fields go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[
        str,
        Field(min_length=1, max_length=64, description="Others only if the chat template names them."),
        WithJsonSchema({"enum": list(ROLES)}),
    ]
    content: Annotated[Any, PlainValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    @property
    def needs_content(self) -> bool:
        """Whether null is no content: OpenAI allows it only if an assistant's message has something else."""
        if self.role == "assistant":
            calls = self.tool_calls or (self.model_extra or {}).get("function_call")
            return not (calls or self.reasoning or self.reasoning_content or self.refusal)
        return self.role != "function" or "content" not in self.model_fields_set

    def for_template(self) -> dict[str, Any]:
        """The fields that are set; `content` always is."""
        given = self.model_dump(exclude_unset=True)
        return {"content": None, **{name: value for name, value in given.items() if value is not None}}


def check_content(messages: Sequence[Message]) -> None:
    """Raise a validation error for a message without content that needs one."""
    for i, message in enumerate(messages):
        if message.content is None and message.needs_content:
            where = f"messages[{i}].content"
            given = f"must not be {shown(None)}" if "content" in message.model_fields_set else "is required"
            more = ", unless the message has tool_calls" if message.role == "assistant" else ""
            raise field_error(where, f"{where} {given}: it is a text or a list of text parts{more}")
