"""One answer's text as a message: reasoning, content and tool calls, complete or as deltas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastkernels.engine.http.parsing.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    ToolParser,
)
from fastkernels.engine.http.parsing.reasoning import ReasoningParser

T = TypeVar("T")


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """A complete message. None: the answer has no such part."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)


class MessageParser:
    """Parses one answer, reasoning first, then content and tool calls.

    one_call         drop every call but the first (parallel_tool_calls=false)
    shows_reasoning  whether reasoning is part of the message (include_reasoning)
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, one_call: bool = False,
        shows_reasoning: bool = True,
    ):  # fmt: skip
        self.reasoning, self.tools = reasoning, tools
        self.one_call, self.shows_reasoning = one_call, shows_reasoning
        self.num_calls = 0
        self._arguments = ""  # of the latest call
        self._after_reasoning = ""

    @property
    def called(self) -> bool:
        """Whether there are calls and the latest one is complete: a stop string may have cut it."""
        return self.num_calls > 0 and _is_object(self._arguments)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        pieces: list[Piece] = []
        if self.reasoning is not None:
            pieces, text = self.reasoning.feed(text)
        self._after_reasoning += text
        if text:
            pieces += [Content(text)] if self.tools is None else self.tools.feed(text)
        return self._counted(pieces)

    def finish(self) -> list[Piece]:
        """End the text."""
        pieces = [] if self.reasoning is None else self.reasoning.finish()
        if self.tools is not None:
            pieces += self.tools.finish()
        return self._counted(pieces)

    def whole(self, text: str) -> Message:
        """The message of a complete text. If a call in it is not complete, all text after the reasoning is content."""
        message = collect([*self.feed(text), *self.finish()])
        if self.tools is not None and self.tools.forced:
            return message
        if all(_is_object(call.arguments) for call in message.calls):
            return message
        self.num_calls = 0
        return Message(self._after_reasoning, message.reasoning)

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        if self.one_call:
            pieces = [p for p in pieces if not isinstance(p, (CallStart, CallArguments)) or p.index == 0]
        if not self.shows_reasoning:
            pieces = [p for p in pieces if not isinstance(p, Reasoning)]
        for piece in pieces:
            if isinstance(piece, CallStart):
                self.num_calls, self._arguments = self.num_calls + 1, ""
            elif isinstance(piece, CallArguments):
                self._arguments += piece.text
        return pieces


class ContentTokens(Generic[T]):
    """Finds the tokens of an answer whose text is content, rather than reasoning or calls.

    parser: of the answer, for this use alone
    """

    def __init__(self, parser: MessageParser):
        self._parser = parser
        self._held: list[tuple[str, T]] = []  # tokens whose text the parser holds back

    def feed(self, tokens: Iterable[tuple[str, T]]) -> list[T]:
        """The tokens of content that these (text, token) complete."""
        found: list[T] = []
        for text, token in tokens:
            self._held.append((text, token))
            found += self._released(self._parser.feed(text))
        return found

    def finish(self) -> list[T]:
        return self._released(self._parser.finish())

    def _released(self, pieces: list[Piece]) -> list[T]:
        if not pieces:
            return []
        held, self._held = self._held, []
        return last_tokens(held, sum(len(p.text) for p in pieces if isinstance(p, Content)))


def last_tokens(tokens: Sequence[tuple[str, T]], length: int) -> list[T]:
    """The last of these (text, token) that together have at least `length` characters."""
    start = len(tokens)
    while start and length > 0:
        start -= 1
        length -= len(tokens[start][0])
    return [token for _, token in tokens[start:]]


def collect(pieces: Iterable[Piece]) -> Message:
    """The message that these pieces make."""
    message = Message()
    for piece in pieces:
        if isinstance(piece, Reasoning):
            message.reasoning = (message.reasoning or "") + piece.text
        elif isinstance(piece, Content):
            message.content = (message.content or "") + piece.text
        elif isinstance(piece, CallStart):
            message.calls.append(Call(piece.id, piece.name))
        else:
            message.calls[piece.index].arguments += piece.text
    return message


def chat_message(message: Message) -> dict[str, Any]:
    """The fields of a chat completion's message, with vLLM's name for reasoning."""
    nothing = not message.calls and message.reasoning is None
    body: dict[str, Any] = {"content": "" if nothing and message.content is None else message.content}
    if message.reasoning is not None:
        body["reasoning"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return body


def chat_delta(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The fields of a chat completion chunk's delta."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, Reasoning):
            delta["reasoning"] = delta.get("reasoning", "") + piece.text
        elif isinstance(piece, Content):
            delta["content"] = delta.get("content", "") + piece.text
        elif isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {
                "index": piece.index, "id": piece.id, "type": "function", "function": function,
            }  # fmt: skip
        else:
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
