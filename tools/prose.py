#!/usr/bin/env python3
"""Check that the project's prose is plain English: `python tools/prose.py [PATH ...]`.

Covers Markdown, CUDA comments, and in Python docstrings, comments, message strings and the length of test names. In
the pages of docs/, sentences and table cells have a limit, too.
The word list is tools/prose_words.txt; exceptions are in tools/prose_allow.txt. Prints one line a finding and exits
with 1 if there is any. Uses the standard library only, so that it runs without an environment and without a network.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
DEFAULT = ["README.md", "CONTRIBUTING.md", "docs", "fastkernels", "integrations", "bench", "tests", "tools"]
SUFFIXES = {".md", ".py", ".cu", ".cuh", ".hpp", ".cpp"}
SKIPPED = {"__pycache__", "build", "dist", "site", "node_modules"}
LONGEST_TEST_NAME, LONGEST_SENTENCE, LONGEST_CELL = 60, 35, 25  # characters; words
# Pages for readers. Reports are records, and their tables have the words of their time
PAGES, RECORDS = (
    ("README.md", "CONTRIBUTING.md", "docs/"),
    ("docs/reports/", "docs/history/", "docs/reference/"),
)

CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK_TARGET = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+|<!--.*?-->", re.DOTALL)
C_COMMENT = re.compile(r"/\*.*?\*/|(?://[^\n]*\n?[ \t]*)+", re.DOTALL)
BULLET = re.compile(r"\s*(?:[-*>|]|\d+[.)])\s+")
HEADING = re.compile(r"\s*#{1,6} ")
# "What the host offers is used." hides its subject; "What is a lane?" is a question, and fine
CLAUSE_SUBJECT = re.compile(
    r"(?:^|(?<=[.!?:;] )|(?<=[.!?]\n))\s*(?:What|Who)(?:\s+[^\s?]+){3,}?(?:[.;](?=\s|$)|$)"
)
SENTENCE_END = re.compile(r"(?<=[.!?;:])[\"')]*\s+")  # or of a part that a reader can take in alone
# "0.96 ms a token"; "once a second" has no quantity
PER = re.compile(
    r"\b(?:us|ms|s|GB|MB|[KMG]iB|bytes|tokens|launches|values|seconds|minutes)\s+"
    r"an?\s+(?:token|step|layer|call|second|request|head|row|round|image|GPU|sequence|module|cell|program|prompt|model|rank)\b"
)
SINCE = re.compile(r"\bsince(?=\s*(?:[.;:)]|$))")
CLAUSE_HINT = "begin with the thing itself: a noun (a docstring: a verb or a noun)"


class Text(NamedTuple):
    """A piece of prose, and the lines on which it begins and ends."""

    line: int
    text: str
    last: int = sys.maxsize
    heading: bool = False

    def line_of(self, offset: int) -> int:
        """Of a literal with escaped line breaks there is no better answer than its last line."""
        return min(self.line + self.text.count("\n", 0, offset), self.last)


class Finding(NamedTuple):
    path: str
    line: int
    word: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r} -> {self.hint}"


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """The text with every match replaced by a placeholder that keeps its line breaks."""
    return pattern.sub(lambda m: "`" + "\n" * m.group().count("\n"), text)


def words() -> list[tuple[re.Pattern[str], str]]:
    """Patterns and hints from prose_words.txt; a space matches any run of spaces and line breaks."""
    found = []
    for line in (HERE / "prose_words.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, _, hint = line.partition("->")
            source = re.sub(r" +", r"\\s+", pattern.strip())
            found.append((re.compile(rf"\b(?:{source})\b", re.IGNORECASE), hint.strip()))
    return found


class Allowed(NamedTuple):
    path: str  # a pattern of fnmatch, relative to the repository's root, where the check runs
    word: str  # the finding's word in lower case, or *

    def covers(self, finding: Finding) -> bool:
        return fnmatch.fnmatch(finding.path, self.path) and self.word in ("*", finding.word.lower())


def allowances() -> list[Allowed]:
    """Exceptions from prose_allow.txt: `PATH: WORD  # reason`."""
    found = []
    for line in (HERE / "prose_allow.txt").read_text().splitlines():
        entry = line.split("#")[0].strip()
        if entry:
            path, _, word = entry.partition(":")
            found.append(Allowed(path.strip(), word.strip().lower()))
    return found


def markdown(source: str) -> Iterator[Text]:
    """Blocks of lines without a heading or an empty line; a row of a table and a bullet is a block of its own."""
    source = blanked(LINK_TARGET, blanked(CODE_SPAN, source))
    block: list[str] = []
    first = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if not line.strip() or HEADING.match(line) or BULLET.match(line):
            if block:
                yield Text(first, "\n".join(block))
            block = []
            if HEADING.match(line):
                yield Text(number, line.lstrip("# "), heading=True)
                continue
            line = BULLET.sub("", line, count=1)
        if line.strip():
            first = first if block else number
            block.append(line)


def too_long(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, first words, hint) of sentences and cells of a page with too many words.

    Code is one word of a sentence; a cell may list names.
    """
    lines = source.splitlines()
    for text in markdown(source):
        first = lines[text.line - 1]
        cell = first.lstrip().startswith("|")
        most = LONGEST_CELL if cell else LONGEST_SENTENCE
        if first.startswith("    ") and not BULLET.match(first):
            continue  # code
        for part in text.text.split("|") if cell else SENTENCE_END.split(text.text):
            count = sum(any(c.isalnum() or c == "`" * (not cell) for c in word) for word in part.split())
            if count > most:
                line = text.line_of(text.text.index(part))
                yield line, " ".join(part.split()[:4]) + " ...", f"{count} words: at most {most}"


def python_comments(source: str) -> Iterator[Text]:
    """Comments; those on consecutive lines are one text."""
    run: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            whole = token.line.lstrip().startswith("#")
            if run and not (whole and line == first + len(run)):
                yield Text(first, "\n".join(run))
                run = []
            first = first if run else line
            run.append(token.string.lstrip("#").strip())
            if not whole:
                yield Text(first, "\n".join(run))
                run = []
    if run:
        yield Text(first, "\n".join(run))


def python_strings(tree: ast.AST) -> Iterator[Text]:
    """Docstrings and other literals of at least two words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            text = blanked(LINK_TARGET, blanked(CODE_SPAN, node.value))
            yield Text(node.lineno, text, node.end_lineno or node.lineno)


def long_test_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME:
            yield node.lineno, node.name


def texts(path: Path, source: str) -> Iterator[Text]:
    if path.suffix == ".md":
        if not source.startswith("<!-- generated"):  # its source is checked
            yield from markdown(source)
    elif path.suffix == ".py":
        yield from python_comments(source)
        yield from python_strings(ast.parse(source))
    else:
        for match in C_COMMENT.finditer(source):
            text = re.sub(r"(?m)^[ \t]*(?://+|\*+/?|/\*+)|\*/", " ", match.group())
            yield Text(source.count("\n", 0, match.start()) + 1, text)


def check(path: Path, source: str, known: list[tuple[re.Pattern[str], str]]) -> Iterator[Finding]:
    shown = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
    for text in texts(path, source):
        end = 0  # of the last finding: where two patterns overlap, the first and longest counts
        found = [(m.start(), -m.end(), m.group(), hint) for p, hint in known for m in p.finditer(text.text)]
        for start, negative_end, word, hint in sorted(found):
            if start >= end:
                end = -negative_end
                yield Finding(shown, text.line_of(start), " ".join(word.split()), hint)
        for match in CLAUSE_SUBJECT.finditer(text.text) if not text.heading else ():
            start = match.end() - len(match.group().lstrip())
            yield Finding(
                shown, text.line_of(start), " ".join(match.group().split()[:4]) + " ...", CLAUSE_HINT
            )
    if shown.startswith(PAGES) and not shown.startswith(RECORDS) and not source.startswith("<!-- generated"):
        yield from (Finding(shown, *found) for found in too_long(source))
        for text in markdown(source):
            for pattern, hint in ((PER, "per, not a"), (SINCE, "state since when")):
                for match in pattern.finditer(text.text):
                    yield Finding(shown, text.line_of(match.start()), " ".join(match.group().split()), hint)
    if path.suffix == ".py":
        for line, name in long_test_names(ast.parse(source)):
            yield Finding(shown, line, name, f"{len(name)} characters: at most {LONGEST_TEST_NAME}")


def files(arguments: list[str]) -> Iterator[Path]:
    for argument in arguments:
        path = Path(argument).resolve()
        if not path.exists():
            raise SystemExit(f"no such file or folder: {argument}")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            parts = file.relative_to(path).parts if path.is_dir() else ()
            hidden = any(p in SKIPPED or p.startswith(".") or p.endswith(".egg-info") for p in parts)
            if file.is_file() and file.suffix in SUFFIXES and not hidden:
                yield file


def main(arguments: list[str]) -> int:
    everything = not arguments
    known, allowed = words(), allowances()
    used: set[Allowed] = set()
    findings = []
    for file in files(arguments or [name for name in DEFAULT if Path(name).exists()]):
        for finding in sorted(check(file, file.read_text(), known), key=lambda f: f.line):
            covering = [a for a in allowed if a.covers(finding)]
            used.update(covering)
            if not covering:
                findings.append(finding)
    for finding in findings:
        print(finding)
    # an exception that covers nothing any more is deleted, or it would hide the next finding
    stale = [a for a in allowed if a not in used] if everything else []
    for entry in stale:
        print(f"tools/prose_allow.txt: {entry.path}: {entry.word}: covers nothing, delete it")
    if findings or stale:
        print(f"prose: {len(findings)} findings in {len({f.path for f in findings})} files", file=sys.stderr)
    return 1 if findings or stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
