"""Tool calls in the XML-like format of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from fastkernels.engine.http.parsing.pieces import CallArguments, Content, MarkerScan, Piece, ToolParser


class Qwen3Coder(ToolParser):
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>.

    Values are text; the function's schema decides which of them are numbers, booleans, lists or objects.
    """

    TOOL, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
    END_TOOL, END_FUNCTION, END_PARAMETER = "</tool_call>", "</function>", "</parameter>"

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._space = ""  # at the end of the content so far; dropped if a call follows
        self._text = ""  # of the name, key or value that is being read
        self._function = self._key = ""
        self._num_parameters = 0
        self._enter("content", self.TOOL, self.FUNCTION)

    def _enter(self, state: str, *markers: str) -> None:
        self._state, self._text, self._scan = state, "", MarkerScan(*markers)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            before, marker, text = self._scan.feed(text)
            if self._state == "content":
                pieces += self._content(before)
                if marker:
                    self._space = ""
            else:
                self._text += before
            if marker:
                pieces += getattr(self, f"_{self._state}_ends")(marker)
        return pieces

    def finish(self) -> list[Piece]:
        held = self._scan.finish()
        if self._state == "content":
            text = self._space + held
            return [Content(text)] if text and (text.strip() or not self.num_calls) else []
        if self._state == "tool":
            return [Content(self.TOOL + self._text + held)]
        if self._state == "name":
            return [Content(self.FUNCTION + self._text + held)]
        return []

    def _content(self, text: str) -> list[Piece]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Content(kept)] if kept else []

    def _content_ends(self, marker: str) -> list[Piece]:
        if marker == self.TOOL:
            self._enter("tool", self.FUNCTION, self.END_TOOL)
        else:
            self._enter("name", ">")
        return []

    def _tool_ends(self, marker: str) -> list[Piece]:
        """Between <tool_call> and its function, or after the function."""
        if marker == self.FUNCTION:
            self._enter("name", ">")
        else:
            self._enter("content", self.TOOL, self.FUNCTION)
        return []

    def _name_ends(self, marker: str) -> list[Piece]:
        self._function, self._num_parameters = self._text.strip(), 0
        start = self.start(self._function)
        self._enter("body", self.PARAMETER, self.END_FUNCTION)
        return [start, CallArguments(start.index, "{")]

    def _body_ends(self, marker: str) -> list[Piece]:
        if marker == self.PARAMETER:
            self._enter("key", ">")
            return []
        # A space-only text after the function is no content, so that </tool_call> ends it.
        self._enter("tool", self.FUNCTION, self.END_TOOL)
        self._state = "closed"
        return [CallArguments(self.num_calls - 1, "}")]

    def _closed_ends(self, marker: str) -> list[Piece]:
        return self._tool_ends(marker)

    def _key_ends(self, marker: str) -> list[Piece]:
        self._key = self._text.strip()
        # The next marker ends a value that lacks its own.
        self._enter("value", self.END_PARAMETER, self.PARAMETER, self.END_FUNCTION)
        return []

    def _value_ends(self, marker: str) -> list[Piece]:
        text = self._text.removeprefix("\n").removesuffix("\n")
        pair = f"{json.dumps(self._key, ensure_ascii=False)}: {self._json(text)}"
        if self._num_parameters:
            pair = ", " + pair
        self._num_parameters += 1
        self._enter("body", self.PARAMETER, self.END_FUNCTION)
        piece = CallArguments(self.num_calls - 1, pair)
        return [piece] if marker == self.END_PARAMETER else [piece, *self._body_ends(marker)]

    def _json(self, text: str) -> str:
        """The value as JSON, in a type that the function's schema permits if there is one."""
        tool = self.tools.get(self._function, {})
        schema = ((tool.get("parameters") or {}).get("properties") or {}).get(self._key)
        kinds = _types(schema)
        if kinds and kinds != {"string"}:
            value = _literal(text)
            if value is not None and _kind(value[0]) & kinds:
                return json.dumps(value[0], ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema permits; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    kinds = set(found if isinstance(found, list) else [found] if found else [])
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            kinds |= _types(option)
    if not kinds:
        kinds = {k for value in schema.get("enum") or () for k in _kind(value)}
    return kinds


def _kind(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    return {"object"} if isinstance(value, dict) else {"array"} if isinstance(value, list) else {"string"}


def _literal(text: str) -> tuple[Any] | None:
    """The value of a JSON text, or of Python's True, [1, 'a'] and the like; None: it is neither."""
    text = text.strip()
    lowered = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in lowered:
        return (lowered[text.lower()],)
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return (value,)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
