"""Answers with a transcript: OpenAI's bodies, subtitles, and events of a stream."""

from __future__ import annotations

import math
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
    """The events of a transcript: `transcript.text.delta` for each finished text, and `transcript.text.done`."""

    def __init__(self, made: Transcript):
        self._made, self._sent = made, 0

    def opening(self) -> bytes:
        return b""

    def events(self, text: str) -> bytes:
        """text: all of it so far."""
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return event({"type": "transcript.text.delta", "delta": new}) if new else b""

    def closing(self) -> bytes:
        made = self._made
        usage = {
            "type": "tokens", "input_tokens": made.prompt_tokens, "output_tokens": made.generated_tokens,
            "total_tokens": made.prompt_tokens + made.generated_tokens,
        }  # fmt: skip
        done = event({"type": "transcript.text.done", "text": made.text, "usage": usage})
        return self.events(made.text) + done + b"data: [DONE]\n\n"

    def failed(self, message: str, status: int) -> bytes:
        return event(error_body(message, status)) + b"data: [DONE]\n\n"
