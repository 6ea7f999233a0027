"""Messages of a conversation, as a request has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fastkernels.engine.http.unserved import field_error, shown

IMAGE_FORM = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def image_part(part: Any) -> dict[str, Any] | None:
    """A content part with an image, as OpenAI has it; None for another part. Raises ValueError.

    `detail` has no effect: a model's images have one resolution.
    """
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    given = {"url": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or not isinstance(given.get("url"), str) or set(given) - {"url", "detail"}:
        raise ValueError(f"an image must be {IMAGE_FORM}")
    return {"type": "image_url", "image_url": {"url": given["url"]}}


def image_urls(contents: Sequence[Any]) -> list[str]:
    """The URLs of all images in the contents of messages, in order."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    """A message's text, or its parts. Whether the template gets parts or their text is decided in prompts.py."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    found: list[dict[str, Any]] = []
    for part in parts:
        if (image := image_part(part)) is not None:
            found.append(image)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        else:
            raise ValueError(f'must be a text, or a list of {{"type": "text", "text": ...}} and {IMAGE_FORM}')
    return found


def _arguments(value: Any) -> str | dict[str, Any] | None:
    if value is not None and not isinstance(value, (str, dict)):
        raise ValueError("must be a text that contains a JSON object")
    return value


_PART = {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}  # fmt: skip
_IMAGE = {
    "type": "object", "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object", "required": ["url"], "additionalProperties": False,
            "properties": {"url": {"type": "string"}, "detail": {"type": ["string", "null"]}},
        },
    },
}  # fmt: skip
_PARTS = {"type": "array", "items": {"anyOf": [_PART, _IMAGE]}}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]}
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
            raise field_error(where, f"{where} {given}: it is a text or a list of parts{more}")
