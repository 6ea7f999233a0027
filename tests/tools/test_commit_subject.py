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


def test_log_is_checked_after_the_base(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for message in ("x" * 80, "Fix the norm\n\nIt was wrong.", "y" * 73):
        git("commit", "-q", "--allow-empty", "-m", message)
    base = git("rev-parse", "HEAD~2")
    for since, says in ((base, "73 characters"), ("0" * 40, "")):
        done = subprocess.run(
            [sys.executable, TOOL, "--log", since], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == bool(says) and done.stderr.count("error:") == bool(says), done.stderr
        assert says in done.stderr and (not says or git("rev-parse", "--short", "HEAD") in done.stderr)
