#!/usr/bin/env python3
"""Check commits' subjects: `python tools/commit_subject.py FILE`, as git's hook commit-msg calls it, or `--log`.

--log [COMMIT] checks all commits after COMMIT (BASE): earlier ones were made before the rule was checked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BASE = "f177ef6d7"
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


def problems_after(base: str) -> list[str]:
    """The faults of the commits after `base`; of none without git or without that commit, as in a shallow clone."""
    command = ["git", "log", "--format=%h%n%B%x00", f"{base}..HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    commits = [text.strip("\n").partition("\n") for text in done.stdout.split("\0") if text.strip()]
    return [f"{name}: {found}" for name, _, message in commits if (found := problem(message)) is not None]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--log"]:
        sys.exit("\n".join(f"error: {text}" for text in problems_after((sys.argv[2:] or [BASE])[0])) or 0)
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: commit_subject.py FILE, the file of a commit's message, or --log [COMMIT]")
    if (found := problem(Path(sys.argv[1]).read_text())) is not None:
        sys.exit(f"error: {found}")
