"""Tests assert our own part of a message: a new version of pydantic or Python may word the rest differently."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
INPUT = "Input should be"  # the beginning of most of pydantic's messages
_VALUE = re.compile(r"\{[^}]*\}|%[sr]")  # where a message has a value


def pieces(template: str, words: int) -> Iterator[str]:
    """The parts of a message without its values that have at least so many words, so that no other text has them."""
    for part in _VALUE.split(template):
        found = part.strip(" ,.:'\"()")
        if len(found.split()) >= words:
            yield found


def pydantics() -> set[str]:
    # Only the compiled module lists the messages.
    errors = pytest.importorskip("pydantic_core._pydantic_core").list_all_errors()
    templates = [error["message_template_python"].removeprefix(INPUT) for error in errors]
    return {INPUT, *(piece for template in templates for piece in pieces(template, 4))}


def pythons() -> set[str]:
    """Messages of `inspect`, which calls functions by their signatures."""
    raised = (n for n in ast.walk(ast.parse(inspect.getsource(inspect))) if isinstance(n, ast.Raise))
    texts = [n.value for error in raised for n in ast.walk(error) if isinstance(n, ast.Constant)]
    return {piece for text in texts if isinstance(text, str) for piece in pieces(text, 3)}


def findings(source: str, words: set[str]) -> list[tuple[int, str]]:
    """(line, words) of a file's strings that have words of others."""
    texts = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return [(n.lineno, piece) for n in texts for piece in sorted(words) if piece in n.value]


@pytest.mark.parametrize("words", [pydantics, pythons])
def test_no_test_has_the_words_of_a_third_party(words) -> None:
    others = words()
    assert len(others) > 20
    found = [
        f"{file.relative_to(TESTS.parent)}:{line}: {piece!r}: assert the field, the value or the status instead"
        for file in sorted(TESTS.rglob("*.py"))
        if file != Path(__file__)
        for line, piece in findings(file.read_text(), others)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (pydantics, "seconds: Input should be a valid integer"),
        (pydantics, "must be greater than or equal to 0"),
        (pythons, "f: missing a required argument: 'y'"),
        (pythons, "forward(self): too many positional arguments"),
    ],
)
def test_words_of_a_third_party_are_found(words, text: str) -> None:
    assert findings(f"x = 1\ny = {text!r}\n", words())[0][0] == 2
    assert not findings("y = 'n must be at least 1, got 0'\n", words())
