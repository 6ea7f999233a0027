"""Separate the reasoning of a model that thinks, <think> ... </think>, from its answer."""

from __future__ import annotations

from fastkernels.core.registry import UnknownName
from fastkernels.engine.http.parsing.pieces import Content, MarkerScan, Piece, Reasoning

START, END = "<think>", "</think>"


class ReasoningParser:
    """Parses one answer. `done` once the reasoning is over; what follows is for the tool parser.

    prompt  the end of the prompt: a template may begin the reasoning there, or end it to turn thinking off
    """

    begins_inside = False  # whether an answer without <think> begins with reasoning

    def __init__(self, prompt: str):
        prompt = prompt.rstrip()
        self.done = prompt.endswith(END)
        self._inside = self.begins_inside or prompt.endswith(START)
        self._scan = MarkerScan(END)
        self._held: str | None = ""  # the beginning of an answer, while it may be <think>

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """(reasoning, text after it)."""
        if self.done:
            return [], text
        if self._held is not None:
            self._held += text
            bare = self._held.lstrip()
            if START.startswith(bare):
                return [], ""
            text, self._held = self._held, None
            if bare.startswith(START):
                self._inside, text = True, bare[len(START) :]
            elif not self._inside:
                self.done = True
                return [], text
        before, marker, rest = self._scan.feed(text)
        self.done = bool(marker)
        return ([Reasoning(before)] if before else []), rest

    def finish(self) -> list[Piece]:
        """End the text: what was held back, as reasoning or content."""
        if self.done:
            return []
        text = self._held if self._held is not None else self._scan.finish()
        return [Reasoning(text) if self._inside else Content(text)] if text else []


class Qwen3(ReasoningParser):
    """Qwen3 and others whose answers begin with <think>, or whose prompts end with it."""


class DeepSeekR1(ReasoningParser):
    """DeepSeek-R1 and others that always think, without <think> in their answers."""

    begins_inside = True


REASONING_PARSERS: dict[str, type[ReasoningParser]] = {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3}


def find_reasoning_parser(name: str | None) -> type[ReasoningParser] | None:
    """The parser of this name. Raises UnknownName."""
    if name is not None and name not in REASONING_PARSERS:
        raise UnknownName("reasoning parser", name, REASONING_PARSERS)
    return None if name is None else REASONING_PARSERS[name]
