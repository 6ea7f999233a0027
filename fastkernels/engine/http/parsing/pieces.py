"""The pieces of an answer, and the base class of parsers that make them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of tool call number `index` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of tool call number `index`: a part of a JSON text."""

    index: int
    text: str


Piece: TypeAlias = "Content | Reasoning | CallStart | CallArguments"


class ToolParser:
    """Finds tool calls in a text that arrives in parts. One instance parses one answer.

    tools   the functions of the request, as its JSON objects
    forced  whether the answer can be nothing but calls, possibly cut off at its maximum length; otherwise the format
            has markers, which are special tokens in some models and must stay in the text
    """

    forced = False

    def __init__(self, tools: Sequence[dict[str, Any]]):
        self.tools = {tool["name"]: tool for tool in tools}
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes. Text that may begin a marker is held back."""
        raise NotImplementedError

    def finish(self) -> list[Piece]:
        """End the text: what was held back becomes content."""
        raise NotImplementedError

    def start(self, name: str) -> CallStart:
        """The start of the next call."""
        self.num_calls += 1
        return CallStart(self.num_calls - 1, self.make_id(), name)

    def make_id(self) -> str:
        return f"chatcmpl-tool-{uuid.uuid4().hex}"


class MarkerScan:
    """Splits a text that arrives in parts at the first of some markers."""

    def __init__(self, *markers: str):
        self.markers, self.held = markers, ""

    def feed(self, text: str) -> tuple[str, str, str]:
        """(text before, marker, text after); without a marker the last two are ''."""
        window, self.held = self.held + text, ""
        found = [(at, -len(m), m) for m in self.markers if (at := window.find(m)) >= 0]
        if found:
            at, _, marker = min(found)
            return window[:at], marker, window[at + len(marker) :]
        keep = len(window) - max(overlap(window, marker) for marker in self.markers)
        self.held = window[keep:]
        return window[:keep], "", ""

    def finish(self) -> str:
        """The text that was held back."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Length of the longest tail of the text that begins the marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
