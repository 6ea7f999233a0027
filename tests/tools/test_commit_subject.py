"""tools/commit_subject.py: the hook that checks a commit's subject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "commit_subject.py"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Fix the norm\n\nIt was wrong.\n", ""),
        ("x" * 72, ""),
        ("# a comment of git\nFix the norm\n", ""),
        ("Merge branch '" + "x" * 80 + "'", ""),
        ("x" * 73, "73 characters, at most 72"),
        ("", "the subject is empty"),
        ("# only a comment\n", "the subject is empty"),
        ("Fix the norm\nat once", "the second line must be empty"),
    ],
)
def test_subject_is_checked(tmp_path: Path, message: str, says: str) -> None:
    (tmp_path / "message").write_text(message)
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path / "message"], capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(says) and says in done.stderr, done.stderr
