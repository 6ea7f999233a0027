"""Messages of a conversation, as a request has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fastkernels.engine.http.requests.unserved import field_error, shown

IMAGE_FORM = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
MEDIA_FORMS = {  # {type of a content part: (kind of medium, form)}
    "image_url": ("image", IMAGE_FORM),
    "video_url": ("video", '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}'),
    "input_audio": ("audio", '{"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}'),
    "audio_url": ("audio", '{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}'),
}
# {type of a content part: its field with text}; the others than `text` are OpenAI's of answers and of responses
TEXT_FORMS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def media_part(part: Any) -> dict[str, Any] | None:
    """A content part with a medium, of type image_url, video_url or audio_url; None for another part.

    Raises ValueError. `detail` has no effect: a model's images have one resolution. Nor has the `format` of an audio,
    which its file tells.
    """
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in MEDIA_FORMS:
        return None
    kind, form = MEDIA_FORMS[name]
    given = part.get(name)
    if name == "input_audio":
        if (
            not isinstance(given, dict)
            or not isinstance(given.get("data"), str)
            or set(given) - {"data", "format"}
        ):
            raise ValueError(f"an audio must be {form}")
        url = f"data:audio/{given.get('format') or 'wav'};base64,{given['data']}"
    else:
        given = {"url": given} if isinstance(given, str) else given
        allowed = {"url", "detail"} if kind == "image" else {"url"}
        if not isinstance(given, dict) or not isinstance(given.get("url"), str) or set(given) - allowed:
            raise ValueError(f"{'a video' if kind == 'video' else f'an {kind}'} must be {form}")
        url = given["url"]
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def media_urls(contents: Sequence[Any]) -> list[tuple[str, str]]:
    """(kind, URL) of all media in the contents of messages, in order."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = [(part["type"].removesuffix("_url"), part) for part in parts if part["type"] != "text"]
    return [(kind, part[part["type"]]["url"]) for kind, part in kinds]


def _text_of(part: Any) -> str | None:
    """The text of a content part, which may be a text alone, as in vLLM; None for another part."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_FORMS[kind]) if isinstance(kind, str) and kind in TEXT_FORMS else None
    return text if isinstance(text, str) else None


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    """A message's text, or its parts. Whether the template gets parts or their text is decided in prompts.py."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    found: list[dict[str, Any]] = []
    for part in parts:
        if (medium := media_part(part)) is not None:
            found.append(medium)
        elif (text := _text_of(part)) is not None:
            found.append({"type": "text", "text": text})
        else:
            raise ValueError(
                f'must be a text, or a list of {{"type": "text", "text": ...}} and {IMAGE_FORM}, or of type'
                " video_url, input_audio or audio_url"
            )
    return found


def _arguments(value: Any) -> str | dict[str, Any] | None:
    if value is not None and not isinstance(value, (str, dict)):
        raise ValueError("must be a text that contains a JSON object")
    return value


_TEXTS: list[dict[str, Any]] = [{"type": "string"}]
_TEXTS += [
    {
        "type": "object",
        "properties": {"type": {"const": kind}, name: {"type": "string"}},
        "required": ["type", name],
    }
    for kind, name in TEXT_FORMS.items()
]
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
_FILES = [
    {
        "type": "object", "required": ["type", name],
        "properties": {
            "type": {"const": name},
            name: {
                "type": "object", "required": ["url"], "additionalProperties": False,
                "properties": {"url": {"type": "string"}},
            },
        },
    }
    for name in ("video_url", "audio_url")
]  # fmt: skip
_AUDIO = {
    "type": "object", "required": ["type", "input_audio"],
    "properties": {
        "type": {"const": "input_audio"},
        "input_audio": {
            "type": "object", "required": ["data"], "additionalProperties": False,
            "properties": {"data": {"type": "string"}, "format": {"type": "string"}},
        },
    },
}  # fmt: skip
_PARTS = {"type": "array", "items": {"anyOf": [*_TEXTS, _IMAGE, *_FILES, _AUDIO]}}
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
