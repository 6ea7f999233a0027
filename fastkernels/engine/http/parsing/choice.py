"""The meaning of a request's tools and tool_choice: the parser of its answers, and the schema of forced calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastkernels.engine.http.parsing.pieces import ToolParser
from fastkernels.engine.http.parsing.tool_parsers import TOOL_PARSERS, ToolFormat
from fastkernels.engine.http.parsing.tools_json import Arguments, Calls
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import ChatCompletionRequest


@dataclass(frozen=True)
class ToolPlan:
    """parser() makes the parser of one answer, None: no tools; schema: JSON schema of the answer, None: any text.

    keeps_special_tokens: whether special tokens must stay in the text, because the parser needs them
    """

    parser: Callable[[], ToolParser] | None = None
    schema: dict[str, Any] | None = None
    keeps_special_tokens: bool = False


def plan_tools(body: ChatCompletionRequest, tool_format: ToolFormat) -> ToolPlan:
    """Raises ApiError for tools that the model would not see, or whose calls could not be found in its answer."""
    if not body.tools or body.tool_choice == "none":
        return ToolPlan()
    template = body.chat_template or tool_format.template()
    if template is None:
        return ToolPlan()  # the conversation itself is refused
    if not tool_format.reads_tools(template):
        raise ApiError(
            400,
            "this model's chat template ignores tools; leave them out, or set tool_choice to 'none'",
            "tools",
        )
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools]
    if body.named_tool is not None:
        (named, *_) = [f for f in functions if f["name"] == body.named_tool]
        return ToolPlan(lambda: Arguments([named]), _parameters(named))
    if body.tool_choice == "required":
        most = {} if body.parallel_tool_calls is not False else {"maxItems": 1}
        calls = [_call(function, i) for i, function in enumerate(functions)]
        schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
        whole = {f"{i}": _moved(_parameters(f), i) for i, f in enumerate(functions) if _has_references(f)}
        return ToolPlan(lambda: Calls(functions), {**schema, "$defs": whole} if whole else schema)
    parser = tool_format.parser(template)
    if parser is None:
        names = ", ".join(sorted(TOOL_PARSERS))
        how = f"start the server with --tool-call-parser ({names})"
        raise ApiError(400, f"the format of this model's tool calls is unknown: {how}", "tools")
    return ToolPlan(lambda: parser(functions), keeps_special_tokens=True)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _call(function: dict[str, Any], index: int) -> dict[str, Any]:
    parameters = {"$ref": f"#/$defs/{index}"} if _has_references(function) else _parameters(function)
    properties = {"name": {"const": function["name"]}, "parameters": parameters}
    return {
        "type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False,
    }  # fmt: skip


def _has_references(function: dict[str, Any]) -> bool:
    return '"$ref"' in json.dumps(_parameters(function))


def _moved(schema: Any, index: int) -> Any:
    """The schema with references that hold after it has become #/$defs/INDEX of another."""
    if isinstance(schema, list):
        return [_moved(item, index) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, index) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#/$defs/{index}{target[1:]}"
    return moved
