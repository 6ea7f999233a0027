"""The messages of a chat that the items of a response's input stand for."""

from __future__ import annotations

from typing import Any

from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.unserved import shown
from fastkernels.engine.http.responses_api.protocol import ResponsesRequest

PARTS = ("input_text", "output_text", "text", "reasoning_text")


def messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Raises ApiError for an item of another kind than messages, function calls, their outputs and reasoning."""
    found: list[dict[str, Any]] = []
    reasoning = ""
    for i, item in enumerate(body.input):
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            reasoning += _text(item.get("content") or [], i)
        elif kind == "function_call":
            call = _fields(item, i, "call_id", "name")
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            arguments = item.get("arguments")
            if arguments is not None and not isinstance(arguments, str):
                raise ApiError(400, f"input[{i}]: arguments must be a string", "input")
            function = {"name": call["name"], "arguments": arguments}
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": call["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            call_id = _fields(item, i, "call_id")["call_id"]
            found.append({"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), i)})
        elif kind == "message":
            role = _fields(item, i, "role")["role"]
            role = "system" if role == "developer" else role  # templates know the older name
            found.append({"role": role, "content": _content(item.get("content"), i)})
        else:
            raise ApiError(
                400, f"input[{i}]: items of type {shown(kind)} are not supported; use message, function_call,"
                " function_call_output or reasoning", "input",
            )  # fmt: skip
        if reasoning and found and found[-1]["role"] == "assistant":
            found[-1]["reasoning"], reasoning = reasoning, ""
    if body.instructions:
        if found and found[0]["role"] == "system":  # templates take one
            found[0]["content"] = f"{body.instructions}\n\n{found[0]['content']}"
        else:
            found.insert(0, {"role": "system", "content": body.instructions})
    if not found:
        raise ApiError(400, "input has no message", "input")
    return found


def _fields(item: dict[str, Any], index: int, *names: str) -> dict[str, str]:
    for name in names:
        if not isinstance(item.get(name), str) or not item[name]:
            raise ApiError(400, f"input[{index}]: {name} must be a string, not empty", "input")
    return {name: item[name] for name in names}


def _content(content: Any, index: int) -> str | list[dict[str, Any]]:
    """A message's text, or with images its parts."""
    if not isinstance(content, list) or not any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    ):
        return _text(content, index)
    found: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "input_image":
            found.append({"type": "text", "text": _text([part], index)})
        elif isinstance(part.get("image_url"), str):
            found.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise ApiError(
                400,
                f"input[{index}]: an input_image needs image_url, a data URL; files are not stored",
                "input",
            )
    return found


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"input[{index}]: the content must be a text or a list of text parts", "input")
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") not in PARTS
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(
                400,
                f"input[{index}]: parts of the content must be text or input_image, got one of type {shown(kind)}",
                "input",
            )
    return "".join(part["text"] for part in content)
