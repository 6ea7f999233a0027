"""Bodies of requests to /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from fastkernels.engine.http.requests.protocol import INT64, Body, CacheSalt, Stop
from fastkernels.engine.http.requests.unserved import field_error, shown
from fastkernels.engine.sampling.sampling_params import MAX_TEMPERATURE

# The fields of each kind of block: (name, type, whether it is required)
BLOCKS: dict[str, tuple[tuple[str, tuple[type, ...], bool], ...]] = {
    "text": (("text", (str,), True),),
    "image": (("source", (dict,), True),),
    "thinking": (("thinking", (str,), True),),
    "redacted_thinking": (),
    "tool_use": (("id", (str,), True), ("name", (str,), True), ("input", (dict,), False)),
    "tool_result": (("tool_use_id", (str,), True), ("content", (str, list), False)),
}  # fmt: skip
ROLE_OF = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
_WORDS: dict[type, str] = {str: "a text", dict: "an object", list: "a list of blocks of type text"}


def _block(block: Any, kinds: tuple[str, ...], where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{where}must be a block of type {', '.join(kinds)}")
    for name, types, required in BLOCKS[kind]:
        value = block.get(name)
        if (value is None and required) or (value is not None and not isinstance(value, types)):
            words = " or ".join(_WORDS[t] for t in types)
            raise ValueError(f"{where}{name} of a block of type {kind} must be {words}")
    if kind == "tool_use" and not block["name"]:
        raise ValueError(f"{where}name of a block of type tool_use must not be empty")
    if kind == "image":
        source = block["source"]
        url, data = source.get("type") == "url", source.get("type") == "base64"
        names = ("url",) if url else ("media_type", "data")
        if not (url or data) or not all(isinstance(source.get(name), str) for name in names):
            form = '{"type": "base64", "media_type": "image/png", "data": ...} or {"type": "url", "url": ...}'
            raise ValueError(f"{where}source of a block of type image must be {form}")
    if isinstance(block.get("content"), list):
        for part in block["content"]:
            _block(part, ("text",), f"{where}content of a block of type tool_result ")
    return block


def _blocks(value: Any, kinds: tuple[str, ...] = tuple(BLOCKS)) -> list[dict[str, Any]]:
    """The blocks of a content, which may be a text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of blocks")
    return [_block(block, kinds, f"entry {i}: ") for i, block in enumerate(value)]


def _system(value: Any) -> list[dict[str, Any]] | None:
    return None if value is None else _blocks(value, ("text",))


def _schema_of(kind: str) -> dict[str, Any]:
    schemas: dict[type, dict[str, Any]] = {str: {"type": "string"}, dict: {"type": "object"}, list: _TEXTS}
    fields: dict[str, Any] = {name: {"anyOf": [schemas[t] for t in types]} for name, types, _ in BLOCKS[kind]}
    if kind == "tool_use":
        fields["name"] = {"type": "string", "minLength": 1}
    required = ["type", *(name for name, _, needed in BLOCKS[kind] if needed)]
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": required}


_TEXT = {
    "type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}  # fmt: skip
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_schema_of(kind) for kind in BLOCKS]}},
    ]
}
_SYSTEM_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}


class _Part(BaseModel):
    """Hints such as cache_control have no effect."""

    model_config = ConfigDict(strict=True, extra="ignore")


class MessageParam(_Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, PlainValidator(_blocks), WithJsonSchema(_CONTENT_SCHEMA)]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> MessageParam:
        for block in self.content:
            role = ROLE_OF.get(block["type"], self.role)
            if role != self.role:
                raise ValueError(f"a block of type {block['type']} must be in a message with role {role}")
        return self


class ToolParam(_Part):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(_Part):
    """name: with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Part):
    """budget_tokens has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=INT64)


class OutputFormat(_Part):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """The part of a request that makes its prompt."""

    messages: list[MessageParam] = Field(min_length=1, max_length=4096)
    system: Annotated[Any, PlainValidator(_system), WithJsonSchema(_SYSTEM_SCHEMA)] = None
    tools: list[ToolParam] | None = Field(None, max_length=512)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Without effect: all prefixes are cached.")
    context_management: dict[str, Any] | None = Field(None, description="Without effect: nothing is removed.")

    @model_validator(mode="after")
    def _named_tool_exists(self) -> CountTokensRequest:
        choice, names = self.tool_choice, [tool.name for tool in self.tools or ()]
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise field_error("tool_choice", "tool_choice.name is required with type tool, and only with it")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise field_error(
                "tool_choice", f"tool_choice names {shown(choice.name)}; tools has {shown(names)}"
            )
        if choice is not None and choice.type == "any" and not names:
            raise field_error("tool_choice", "tool_choice of type any needs tools")
        return self


class MessagesRequest(CountTokensRequest):
    """Anthropic's fields, and vLLM's cache_salt and chat_template_kwargs."""

    max_tokens: int = Field(ge=1, le=INT64)
    stop_sequences: Stop = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    cache_salt: CacheSalt = None
