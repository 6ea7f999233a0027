"""Texts are split at the ends of sentences into parts of bounded length, without loss."""

from __future__ import annotations

import pytest

from fastkernels.engine.speech.sentences import LONGEST, MOST, split


def words(text: str) -> int:
    return len(text.split())


def split_words(text: str) -> list[str]:
    return split(text, words)


def test_sentences_are_joined_up_to_the_most() -> None:
    sentence = "One two three four five six seven eight nine ten. "
    parts = split_words(sentence * 20)
    assert [words(part) for part in parts] == [80, 80, 40] and MOST == 80
    assert " ".join(parts) == (sentence * 20).strip()


def test_short_rest_joins_the_part_before_it() -> None:
    sentence = "One two three four five six seven eight nine ten. "
    assert [words(part) for part in split_words(sentence * 9)] == [90]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Pi is 3.14. See example.com!", ["Pi is 3.14. See example.com!"]),
        ("no end", ["no end."]),
        ("他来了", ["他来了。"]),
        ("  a\n\nb  ", ["a b."]),
        ('He said "no."', ['He said "no."']),
        ("...", []),
        ("", []),
    ],
)
def test_ends_are_marked_and_silence_is_dropped(text: str, want: list[str]) -> None:
    assert split_words(text) == want


def test_points_in_numbers_end_no_sentence() -> None:
    assert split("a3.5b c. d", lambda text: 50) == ["a3.5b c.", "d."]


@pytest.mark.parametrize(
    ("text", "count"), [("word " * 1000, words), ("x" * 4096, len), ("好" * 1000, len), ("a, " * 900, len)]
)
def test_long_sentences_are_cut(text: str, count) -> None:  # type: ignore[no-untyped-def]
    parts = split(text, count)
    assert max(map(count, parts)) <= LONGEST + 1  # with the mark at its end
    assert "".join(parts).replace(" ", "").rstrip(".。") == text.replace(" ", "").rstrip(".。")
