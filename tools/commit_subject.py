#!/usr/bin/env python3
"""Check a commit's subject: `python tools/commit_subject.py FILE`, as git's hook commit-msg calls it."""

from __future__ import annotations

import sys
from pathlib import Path

LONGEST = 72
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def problem(message: str) -> str | None:
    """The fault of the subject, or None. Lines that begin with # are comments of git."""
    subject, *body = [line for line in message.splitlines() if not line.startswith("#")] or [""]
    if not subject.strip():
        return "the subject is empty: say what the commit does, in the imperative"
    if len(subject) > LONGEST and not subject.startswith(MADE_BY_GIT):
        return f"the subject has {len(subject)} characters, at most {LONGEST}: move the rest to the body: {subject}"
    if body and body[0].strip():
        return f"the second line must be empty, between subject and body: {body[0]}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: commit_subject.py FILE, the file of a commit's message")
    if (found := problem(Path(sys.argv[1]).read_text())) is not None:
        sys.exit(f"error: {found}")
