"""Text from elsewhere, made safe to print."""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?", re.S)
_BAD = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str, limit: int = 2000, lines: bool = False) -> str:
    """The text without control characters."""
    text = _BAD.sub(
        lambda m: "\n" if lines and m[0] == "\n" else " " if m[0] in "\n\t\r" else "", _ESCAPES.sub("", text)
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"
