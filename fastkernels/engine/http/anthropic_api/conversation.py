"""The chat completion that a request to /v1/messages stands for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fastkernels.engine.http.anthropic_api.protocol import CountTokensRequest, MessageParam, MessagesRequest

SAME = ("model", "stream", "temperature", "top_p", "top_k", "max_tokens", "cache_salt")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ATTRIBUTION = (
    "x-anthropic-billing-header"  # of Claude Code: another one in each request, so that no prefix is found
)


def chat_body(request: CountTokensRequest) -> dict[str, Any]:
    """The body of the chat completion. A message of the assistant at the end is continued."""
    chat: dict[str, Any] = {name: getattr(request, name) for name in SAME if name in request.model_fields_set}
    chat["messages"] = [
        *_system(request.system or ()),
        *(m for given in request.messages for m in _messages(given)),
    ]
    last = chat["messages"][-1] if chat["messages"] else {}
    if last.get("role") == "assistant" and last.get("content") and "tool_calls" not in last:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(request, MessagesRequest) and request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name, "parameters": {"type": "object", **tool.input_schema},
                    **({} if tool.description is None else {"description": tool.description}),
                },
            }
            for tool in request.tools
        ]  # fmt: skip
    choice = request.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = named if choice.name is not None else CHOICES[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    thinks = {} if request.thinking is None else {"enable_thinking": request.thinking.type != "disabled"}
    chat["chat_template_kwargs"] = {**thinks, **(request.chat_template_kwargs or {})}
    output = request.output_config
    if output is not None and output.effort is not None:
        chat["reasoning_effort"] = output.effort
    if output is not None and output.format is not None:
        schema = {"name": "answer", "schema": output.format.json_schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _system(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [block["text"] for block in blocks if not block["text"].startswith(ATTRIBUTION)]
    return [{"role": "system", "content": "".join(texts)}] if any(texts) else []


def _messages(given: MessageParam) -> list[dict[str, Any]]:
    """The messages of one: results of tools are messages of their own, before the text."""
    if given.role == "system":
        return _system(given.content)
    found: list[dict[str, Any]] = []
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for block in given.content:
        by_kind.setdefault(block["type"], []).append(block)
    for result in by_kind.get("tool_result", ()):
        found.append(
            {"role": "tool", "tool_call_id": result["tool_use_id"], "content": _text(result.get("content"))}
        )
    texts = [part for block in given.content if (part := _part(block)) is not None]
    message: dict[str, Any] = {
        "role": given.role,
        "content": texts[0]["text"] if len(texts) == 1 and "text" in texts[0] else texts or "",
    }
    if "thinking" in by_kind:
        message["reasoning"] = "".join(block["thinking"] for block in by_kind["thinking"])
    if "tool_use" in by_kind:
        message["tool_calls"] = [
            {
                "id": use["id"], "type": "function",
                "function": {"name": use["name"], "arguments": json.dumps(use.get("input") or {}, ensure_ascii=False)},
            }
            for use in by_kind["tool_use"]
        ]  # fmt: skip
    return found if found and not texts else [*found, message]


def _part(block: dict[str, Any]) -> dict[str, Any] | None:
    """The content part of a block of type text or image; None for others and an empty text."""
    if block["type"] == "image":
        source = block["source"]
        url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": block["text"]} if block["type"] == "text" and block["text"] else None


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
