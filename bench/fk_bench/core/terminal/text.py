"""Text from a process or file that is not trusted, made safe to print."""

from __future__ import annotations

import re

# Sequences whole: CSI (colours, cursor), strings up to their end (titles, links), and other escapes.
_STRING_END = "(?:\x1b\\\\|\x9c|\x07)"
_ANSI = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"
    f"|(?:\x1b[P\\]X^_]|[\x90\x9d\x98\x9e\x9f])[^\x1b\x9c\x07]*{_STRING_END}?"
    "|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
# Bidirectional marks, embeddings, overrides and isolates; zero-width and invisible characters; line separators.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")  # of a set or a submission; files have it, too
NAME_RULE = "at most 64 letters, digits and ._+-, of which the first is a letter or a digit"
_READ = 8  # characters that are read for each one that is kept
ELLIPSIS = "…"


def printable(text: str, limit: int = 2000, lines: bool = False) -> str:
    """The visible characters of `text`, at most `limit`, cut with an ellipsis.

    Removed are ANSI escape sequences, control, bidirectional and zero-width characters; a surrogate becomes U+FFFD.
    Newlines and tabs become spaces; with `lines` they stay.
    """
    read = text[: _READ * limit + 64]
    shown = _INVISIBLE.sub("", _ANSI.sub("", read.replace("\r\n", "\n")))
    if lines:
        shown = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", shown)
    else:
        shown = _CONTROL.sub("", re.sub("[\n\t\r]", " ", shown))
    shown = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", shown)
    cut = len(shown) > limit or len(read) < len(text)
    return shown[: limit - 1] + ELLIPSIS if cut else shown
