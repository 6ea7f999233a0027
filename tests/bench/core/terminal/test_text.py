"""Text from untrusted processes: nothing in it moves the cursor, hides or reorders what is printed."""

from __future__ import annotations

import time
import unicodedata

import pytest
from fk_bench.core.terminal.text import printable
from hypothesis import given
from hypothesis import strategies as st

CHARACTERS = st.text(st.characters() | st.sampled_from("\x1b\x9b\x9d[]m;0\x07\n\r\t\u202e\u200b\ud800a"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ünïcode, 文字", "plain text, ünïcode, 文字"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2K\x1b[1A\rrms_norm ok", "a rms_norm ok"),
        ("\x9b1;31mred", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;title never ends", ""),
        ("\x1bPq#0\x1b\\after", "after"),
        ("\x1b(Bset\x1bc", "set"),
        ("a\nb\tc\r\nd", "a b c d"),
        ("a\0b\x08c\x7fd\x85e", "abcde"),
        ("\u202eko\u202c \u2066x\u2069", "ko x"),
        ("o\u200bk\ufeff\u2060", "ok"),
        ("bad \ud800", "bad \N{REPLACEMENT CHARACTER}"),
        ("\x1b", ""),
    ],
)
def test_hidden_characters_are_removed(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_and_tabs_may_stay() -> None:
    assert printable("a\r\nb\t\x1b[1mc\rd", lines=True) == "a\nb\tcd"


def test_long_text_ends_with_ellipsis() -> None:
    assert printable("a" * 11, 10) == "a" * 9 + "…"
    assert printable("a" * 10, 10) == "a" * 10


def test_long_text_takes_little_time() -> None:
    start = time.process_time()
    for piece in ("\x1b]", "\x1b[0", "a", "\u200b", "\x1b"):
        assert len(printable(piece * 1_000_000)) <= 2000
    assert time.process_time() - start < 2.0


@given(CHARACTERS, st.integers(1, 50), st.booleans())
def test_any_text_becomes_safe(text: str, limit: int, lines: bool) -> None:
    shown = printable(text, limit, lines)
    assert len(shown) <= limit
    kept = "\n\t" if lines else ""
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in kept]
    assert not set(shown) & {
        chr(c) for c in (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    }
    shown.encode()
    assert printable(shown, limit, lines) == shown
