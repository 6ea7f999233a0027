"""Tool calls in JSON: the formats of Hermes (and Qwen 2.5 and 3), Llama 3 and Mistral."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from typing import Any

from fastkernels.engine.http.parsing.json_call import JsonCall
from fastkernels.engine.http.parsing.pieces import (
    CallArguments,
    CallStart,
    Content,
    MarkerScan,
    Piece,
    ToolParser,
)


class _Objects(ToolParser):
    """The common part: one call at a time, started once its name and arguments are known."""

    marker = ""  # announces a call

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._call: JsonCall | None = None
        self._started: CallStart | None = None
        self._space = ""  # at the end of the content so far
        self._before = ""  # space and marker before the call: content if it turns out to be none

    def _accepts(self, name: str) -> bool:
        return True

    def _feed_call(self, text: str) -> tuple[list[Piece], str]:
        """(pieces, rest of the text). The call has ended if `_call` is None afterwards."""
        if self._call is None:
            self._call, self._started = JsonCall(), None
        call, pieces = self._call, list[Piece]()
        rest = call.feed(text)
        if self._started is None and call.ready and self._accepts(str(call.name)):
            self._started = self.start(str(call.name))
            pieces.append(self._started)
        if self._started is not None:
            new = call.take_arguments()
            if new:
                pieces.append(CallArguments(self._started.index, new))
        if call.failed or call.done:
            if self._started is None:
                pieces.append(Content(self._before + call.raw))
            self._call = None
        return pieces, rest

    def _finish_call(self) -> list[Piece]:
        call, self._call = self._call, None
        return [Content(self._before + call.raw)] if call is not None and self._started is None else []

    def _announced(self) -> None:
        """The marker was read."""
        self._before, self._space = self._space + self.marker, ""

    def _content(self, text: str) -> list[Piece]:
        """Content without the space at its end, which waits for more content."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Content(kept)] if kept else []

    def _finish_content(self, held: str) -> list[Piece]:
        text, self._space = self._space + held, ""
        return [Content(text)] if text and (text.strip() or not self.num_calls) else []


class Hermes(_Objects):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, after and between content."""

    marker, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._state = "content"
        self._scan = MarkerScan(self.marker)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._state == "call":
                found, text = self._feed_call(text)
                pieces += found
                if self._call is None and self._started is not None:  # a call may lack its closing marker
                    self._state, self._scan = "after", MarkerScan(self.CLOSE, self.marker)
                elif self._call is None:
                    self._state, self._scan = "content", MarkerScan(self.marker)
                continue
            before, marker, text = self._scan.feed(text)
            pieces += self._content(before)
            if marker == self.marker:
                self._state = "call"
                self._announced()
            elif marker:
                self._state, self._scan, self._space = "content", MarkerScan(self.marker), ""
        return pieces

    def finish(self) -> list[Piece]:
        if self._state == "call":
            return self._finish_call() if self._call is not None else [Content(self._before)]
        return self._finish_content(self._scan.finish())


class Llama3Json(_Objects):
    """An answer that is {"name": ..., "parameters": {...}} of a known function, or several, separated by semicolons.

    The format has no other marker, so an object that is no call of a tool is content.
    """

    TAG = "<|python_tag|>"

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._state = "start"
        self._held = ""

    def _accepts(self, name: str) -> bool:
        return name in self.tools

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._state == "content":
                return [*pieces, Content(text)]
            if self._state == "call":
                found, text = self._feed_call(text)
                pieces += found
                if self._call is None:
                    self._state = "start" if self._started is not None else "content"
                continue
            self._held += text
            bare = self._held.lstrip(" \t\r\n;," if self.num_calls else None)
            bare = bare.removeprefix(self.TAG).lstrip()
            if bare.startswith("{"):
                self._state, text, self._held = "call", bare, ""
            elif self.TAG.startswith(bare):
                break
            else:
                self._state, text, self._held = "content", self._held, ""
        return pieces

    def finish(self) -> list[Piece]:
        if self._state == "call":
            return self._finish_call()
        return self._finish_content(self._held)


class Mistral(_Objects):
    """[TOOL_CALLS] and a JSON list of calls; since version 11 of the format, [TOOL_CALLS]name[ARGS]{...} for each."""

    marker, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def __init__(self, tools: Sequence[dict[str, Any]]):
        super().__init__(tools)
        self._state = "content"
        self._scan = MarkerScan(self.marker)
        self._name = ""

    def make_id(self) -> str:
        """Nine letters and digits, which Mistral's templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._state == "call":
                found, text = self._feed_call(text)
                pieces += found
                if self._call is None:
                    self._state = "list" if self._listed else "content"
            elif self._state == "list":
                text = text.lstrip(" \t\r\n,")
                if text.startswith("{"):
                    self._state = "call"
                elif text:
                    self._state, text = "content", text.removeprefix("]")
            elif self._state == "name":
                text = self._after_marker(text)
            else:
                before, marker, text = self._scan.feed(text)
                pieces += self._content(before)
                if marker:
                    self._state, self._name = "name", ""
                    self._announced()
        return pieces

    _listed = False

    def _after_marker(self, text: str) -> str:
        """Read '[', or the name up to the arguments. Returns the text to go on with."""
        self._name = (self._name + text).lstrip()
        if self._name.startswith("[{") or (self._name.startswith("[") and self._name[1:].isspace()):
            self._state, self._listed = "list", True
            return self._name[1:]
        name, brace, rest = self._name.partition("{")
        if not brace:
            return ""
        name = name.removesuffix(self.ARGS).split(self.ID)[0].strip()
        self._state, self._listed = "call", False
        # The same object as in the list, so that one scanner reads both.
        self._call, self._started = JsonCall(), None
        self._call.feed('{"name": ' + json.dumps(name) + ', "arguments": ')
        return brace + rest

    def _feed_call(self, text: str) -> tuple[list[Piece], str]:
        pieces, rest = super()._feed_call(text)
        if self._call is not None and not self._listed and self._call.complete:
            self._call = None  # the object that was opened here has no end in the text
        return pieces, rest

    def finish(self) -> list[Piece]:
        if self._state == "call":
            return self._finish_call()
        if self._state == "name":
            return [Content(self._before + self._name)]
        return self._finish_content(self._scan.finish())


class Calls(_Objects):
    """[{"name": ..., "parameters": {...}}, ...]: the text that tool_choice 'required' permits."""

    forced = True

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                bare = text.lstrip(" \t\r\n,[]")
                self._before += text[: len(text) - len(bare)]
                text = bare
                if not text:
                    break
            found, text = self._feed_call(text)
            pieces += found
            if self._call is None:
                self._before = ""
        return pieces

    def finish(self) -> list[Piece]:
        """End the text. A call that was cut after its name has no arguments; in its name, it is content."""
        call, self._call = self._call, None
        if call is None:
            return [Content(self._before)] if self._before and not self.num_calls else []
        if self._started is not None:
            return []
        return [Content(self._before + call.raw)] if call.name is None else [self.start(call.name)]


class Arguments(ToolParser):
    """The arguments of one function: the text that a named tool_choice permits."""

    forced = True

    def feed(self, text: str) -> list[Piece]:
        start: list[Piece] = [] if self.num_calls else [self.start(next(iter(self.tools)))]
        return [*start, CallArguments(0, text)]

    def finish(self) -> list[Piece]:
        """End the text. An answer that was cut before its first character is a call without arguments."""
        return [] if self.num_calls else [self.start(next(iter(self.tools)))]
