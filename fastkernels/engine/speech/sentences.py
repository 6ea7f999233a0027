"""Split a text into parts of some sentences, which are spoken one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

MOST, LAST = (
    80,
    20,
)  # tokens of a part that has several sentences; of a last part that joins the one before it
LONGEST = 160  # tokens of any part: longer sentences are cut
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_SPACES = re.compile(r"\s+")
# The end of a sentence with closing quotes; a point within a number or a name is none
_END = re.compile(r"(?:[.!?;:…]+[\"'”’)\]]*(?=\s|$)|[。！？；：…]+[”’」』）\"]*)")
_COMMA = re.compile(r"[,，、]\s*")
_SPOKEN = re.compile(r"[^\W_]", re.UNICODE)


def split(text: str, count: Callable[[str], int]) -> list[str]:
    """The parts of a text, with a mark at its end; none if there is nothing to speak. count: tokens of a text."""
    text = _SPACES.sub(" ", text).strip()
    parts: list[str] = []
    sizes: list[int] = []
    for sentence in _short(_pieces(_END, text), count):
        size = count(sentence)
        if parts and sizes[-1] + size <= MOST:
            parts[-1], sizes[-1] = parts[-1] + sentence, sizes[-1] + size
        else:
            parts.append(sentence)
            sizes.append(size)
    if len(parts) > 1 and sizes[-1] < LAST:
        last = parts.pop()
        parts[-1] += last
    parts = [part.strip() for part in parts if _SPOKEN.search(part)]
    return [*parts[:-1], _closed(parts[-1])] if parts else []


def _pieces(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The text cut behind each match."""
    start = 0
    for found in pattern.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    if start < len(text):
        yield text[start:]


def _short(sentences: Iterator[str], count: Callable[[str], int]) -> Iterator[str]:
    """Sentences of at most LONGEST tokens: longer ones are cut at commas, at spaces, or anywhere."""
    for sentence in sentences:
        if count(sentence) <= LONGEST:
            yield sentence
            continue
        for piece in _pieces(_COMMA, sentence):
            while count(piece) > LONGEST:
                end = max(1, len(piece) * LONGEST // (2 * count(piece)))
                while count(piece[:end]) > LONGEST:
                    end = max(1, end // 2)
                    if end == 1:
                        break
                space = piece.rfind(" ", 1, end)
                end = space + 1 if space > 0 else end
                yield piece[:end]
                piece = piece[end:]
            if piece:
                yield piece


def _closed(part: str) -> str:
    """The part with a mark at its end."""
    if _END.search(part[-2:]) or part[-1] in ",，、":
        return part
    return part + ("。" if _CJK.search(part) else ".")
