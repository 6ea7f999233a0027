"""The meaning of a request's tools and tool_choice: the parser of its answers, and the schema of forced calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.parsing.pieces import ToolParser
from fastkernels.engine.http.parsing.tool_parsers import TOOL_PARSERS, ToolFormat
from fastkernels.engine.http.parsing.tools_json import Arguments, Calls
from fastkernels.engine.http.protocol import ChatCompletionRequest


@dataclass(frozen=True)
class ToolPlan:
    """parser() makes the parser of one answer, None: no tools; schema: JSON schema of the answer, None: any text."""

    parser: Callable[[], ToolParser] | None = None
    schema: dict[str, Any] | None = None
    keeps_special_tokens: bool = False


def plan_tools(body: ChatCompletionRequest, tool_format: ToolFormat) -> ToolPlan:
    """Raises ApiError for tools that the model would not see, or whose calls could not be found in its answer."""
    if not body.tools or body.tool_choice == "none":
        return ToolPlan()
    if not tool_format.reads_tools():
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
        calls = [_call(function) for function in functions]
        return ToolPlan(
            lambda: Calls(functions), {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
        )
    parser = tool_format.parser()
    if parser is None:
        names = ", ".join(sorted(TOOL_PARSERS))
        how = f"start the server with --tool-call-parser ({names})"
        raise ApiError(400, f"the format of this model's tool calls is unknown: {how}", "tools")
    return ToolPlan(lambda: parser(functions), None, parser.keeps_special_tokens)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    properties = {"name": {"const": function["name"]}, "parameters": _parameters(function)}
    return {
        "type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False,
    }  # fmt: skip
