"""The prose check: its findings, its exceptions, and the texts that it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "prose.py"
CLAUSE = "Wh" + "at the host offers is used."
WORD = "some" + "body"  # in two parts, or this file would be a finding


def check(folder: Path, name: str, source: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(source)
    return subprocess.run([sys.executable, TOOL, name], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("a.md", f"# Title\n\nA sentence that\nnames {WORD}.\n", 4),
        ("a.md", "- first\n- no " + "telling why\n", 2),
        ("a.md", "This was as" + "ked\nfor twice.\n", 1),
        ("a.md", f"Good. {CLAUSE}\n", 1),
        ("a.py", f'"""A module.\n\nFor {WORD}.\n"""\n', 3),
        ("a.py", f"x = 1\ny = 2  # for {WORD}\n", 2),
        ("a.py", f"def f():\n    raise ValueError(f'{{1}} is for {WORD}')\n", 2),
        ("a.cu", f"int a;\n// one line\n// for {WORD}\n", 3),
        ("test_a.py", "def test_" + "a" * 60 + "():\n    pass\n", 1),
    ],
)
def test_finding_names_file_and_line(tmp_path: Path, name: str, source: str, line: int) -> None:
    result = check(tmp_path, name, source)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{name}:{line}: ") and " -> " in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.md", f"The field `{WORD}` and [this page](https://example.org/{WORD}).\n"),
        ("a.md", "Text. Wh" + "at is a lane? A server.\n"),
        ("a.md", "## What works with what\n\nText.\n"),
        ("a.py", f"{WORD} = 1\n"),
        ("test_a.py", "def test_" + "a" * 55 + "():\n    pass\n"),
    ],
)
def test_code_questions_and_headings_are_no_findings(tmp_path: Path, name: str, source: str) -> None:
    result = check(tmp_path, name, source)
    assert (result.returncode, result.stdout) == (0, "")


LONG = "word " * 36


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"Short.\n\n{LONG}.\n", 3),
        ("| a | b |\n| --- | --- |\n| a | " + "word " * 26 + "|\n", 3),
        ("It takes 0.9 ms a" + " token.\n", 1),
        ("It was faster, and is " + "since.\n", 1),
    ],
)
def test_pages_have_limits_that_reports_do_not(tmp_path: Path, text: str, line: int) -> None:
    for folder in ("docs", "docs/reports"):
        (tmp_path / folder).mkdir()
    result = check(tmp_path, "docs/a.md", text)
    assert result.returncode == 1 and result.stdout.startswith(f"docs/a.md:{line}: ")
    assert (
        check(tmp_path, "docs/reports/a.md", text).returncode == check(tmp_path, "a.md", text).returncode == 0
    )


def test_clauses_names_and_other_cells_do_not_add_up(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    cells = "| " + "word " * 20 + "| " + "`name`, " * 30 + "|\n"
    result = check(tmp_path, "docs/a.md", f"{'word ' * 20}: {'word ' * 20}.\n\n{cells}")
    assert (result.returncode, result.stdout) == (0, "")


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, TOOL, "no-such-folder"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1 and "no-such-folder" in result.stderr


def test_exceptions_cover_their_word_and_stale_ones_are_reported(tmp_path: Path) -> None:
    for file in ("prose.py", "prose_words.txt"):
        (tmp_path / file).write_text((TOOL.parent / file).read_text())
    (tmp_path / "prose_allow.txt").write_text(f"a.md: {WORD}  # a quotation\nb.md: *\n")
    for name in ["README.md", "CONTRIBUTING.md"]:
        (tmp_path / name).write_text("Text.\n")
    for name in ["docs", "fastkernels", "integrations", "bench", "tests", "tools"]:
        (tmp_path / name).mkdir()
    (tmp_path / "a.md").write_text(f"For {WORD}.\n")
    command = [sys.executable, tmp_path / "prose.py"]
    assert subprocess.run([*command, "a.md"], cwd=tmp_path).returncode == 0
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and "b.md: *: covers nothing" in result.stdout
