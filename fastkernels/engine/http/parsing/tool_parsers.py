"""The parsers of tool calls by name, and which of them a chat template is for."""

from __future__ import annotations

from typing import Any

from fastkernels.core.registry import UnknownName
from fastkernels.engine.http.parsing.pieces import ToolParser
from fastkernels.engine.http.parsing.tools_json import Hermes, Llama3Json, Mistral
from fastkernels.engine.http.parsing.tools_xml import Qwen3Coder

# vLLM's names
TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral, "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
}  # fmt: skip


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser of this name. Raises UnknownName."""
    if name not in TOOL_PARSERS:
        raise UnknownName("tool call parser", name, TOOL_PARSERS)
    return TOOL_PARSERS[name]


def detect(template: str) -> type[ToolParser] | None:
    """The parser for the format that the template teaches; None: not one of ours, or it cannot be told."""
    if "<tool_call>" in template:
        if "<function=" in template and "<parameter=" in template:
            return Qwen3Coder
        return Hermes if "arguments" in template and "<arg_key>" not in template else None
    if "[TOOL_CALLS]" in template:
        return Mistral
    if "<|python_tag|>" in template or "ipython" in template:
        return Llama3Json if "parameters" in template else None
    return None


MOST_TEMPLATES = 64  # whose use of tools is remembered
PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ToolFormat:
    """The format of a tokenizer's tool calls.

    name: of the parser; None: detected from the chat template
    """

    def __init__(self, tokenizer: Any, name: str | None):
        self.tokenizer, self.name = tokenizer, name
        self._reads: dict[str, bool] = {}

    def template(self) -> str | None:
        """The chat template for a conversation with tools; None: there is none."""
        try:
            return self.tokenizer.get_chat_template(tools=[PROBE])
        except (AttributeError, ValueError):  # no tokenizer, or no template
            return None

    def parser(self, template: str) -> type[ToolParser] | None:
        """The parser of the format that this template teaches; None: unknown."""
        return find_tool_parser(self.name) if self.name is not None else detect(template)

    def reads_tools(self, template: str) -> bool:
        """Whether the template shows tools to the model: a conversation with one differs from the same without."""
        if template not in self._reads:
            if len(self._reads) >= MOST_TEMPLATES:  # those of requests
                self._reads.clear()
            self._reads[template] = self._differs(template)
        return self._reads[template]

    def _differs(self, template: str) -> bool:
        def render(tools: list[dict[str, Any]] | None) -> str:
            question = [{"role": "user", "content": "Hi"}]
            return self.tokenizer.apply_chat_template(
                question, tools=tools, tokenize=False, chat_template=template
            )

        try:
            return render([PROBE]) != render(None)
        except Exception:  # it needs another conversation than this one: the request itself will tell
            return True
