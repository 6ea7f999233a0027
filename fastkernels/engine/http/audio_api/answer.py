"""Answers with a transcript: OpenAI's bodies, subtitles, and events of a stream."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastkernels.engine.engines.recognition import Segment, Transcript
from fastkernels.engine.http.answers.responses import event
from fastkernels.engine.http.requests.errors import error_body

MEDIA = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


def body(made: Transcript, task: str, names: dict[str, str], verbose: bool) -> dict[str, Any]:
    """names: of languages, by code."""
    usage = {"type": "duration", "seconds": math.ceil(made.duration)}
    if not verbose:
        return {"text": made.text, "usage": usage}
    return {
        "task": task, "language": names.get(made.language, made.language), "duration": round(made.duration, 3),
        "text": made.text, "segments": [asdict(s) for s in made.segments], "usage": usage,
    }  # fmt: skip


def subtitles(segments: Iterable[Segment], form: str) -> str:
    """SubRip ('srt') or WebVTT ('vtt')."""
    comma, parts = ("," if form == "srt" else "."), ["WEBVTT\n\n"] if form == "vtt" else []
    for i, segment in enumerate(segments, 1):
        number = f"{i}\n" if form == "srt" else ""
        text = segment.text.strip().replace("-->", "->")  # which would end the text
        parts.append(f"{number}{_clock(segment.start, comma)} --> {_clock(segment.end, comma)}\n{text}\n\n")
    return "".join(parts)


def _clock(seconds: float, comma: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{comma}{thousandths:03}"


class Events:
    """The events of a transcript: `transcript.text.delta` for each finished text, and `transcript.text.done`.

    Each has the fields of vLLM's chunk, too, whose clients read `choices`. usage: end with a chunk that has no choice,
    and vLLM's numbers of tokens; continuous: which all events have
    """

    def __init__(
        self, made: Transcript, task: str, model: str, usage: bool = False, continuous: bool = False
    ):
        self._made, self._sent = made, 0
        self._usage, self._continuous = usage, usage and continuous
        kind = {"transcribe": ("trsc", "transcription"), "translate": ("trsl", "translation")}[task]
        self._chunk = {
            "id": f"{kind[0]}-{uuid.uuid4().hex}", "object": f"{kind[1]}.chunk", "created": int(time.time()),
            "model": model,
        }  # fmt: skip

    def opening(self) -> bytes:
        return b""

    def events(self, text: str) -> bytes:
        """text: all of it so far."""
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        if not new:
            return b""
        usage = {"usage": self._tokens()} if self._continuous else {}
        return event({"type": "transcript.text.delta", "delta": new, **self._choice(new, None), **usage})

    def closing(self) -> bytes:
        made, read, written = self._made, self._made.prompt_tokens, self._made.generated_tokens
        usage: dict[str, Any] = {"type": "tokens", "input_tokens": read, "output_tokens": written}
        usage |= self._tokens() if self._continuous else {"total_tokens": read + written}
        done = event(
            {"type": "transcript.text.done", "text": made.text, **self._choice("", "stop"), "usage": usage}
        )
        if self._usage:
            done += event({**self._chunk, "choices": [], "usage": self._tokens()})
        return self.events(made.text) + done + b"data: [DONE]\n\n"

    def failed(self, message: str, status: int) -> bytes:
        return event(error_body(message, status)) + b"data: [DONE]\n\n"

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"delta": {"content": text}, "finish_reason": reason, "stop_reason": None}
        return {**self._chunk, "choices": [choice]}

    def _tokens(self) -> dict[str, int]:
        """vLLM's usage, of all windows that have ended."""
        read, written = self._made.prompt_tokens, self._made.generated_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
