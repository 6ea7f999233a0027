"""Folders of runs: what a wrong name gets as an answer."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("fk-bench-runs")  # where commands put a run without --out
SHOWN = 5


def missing(run: Path) -> str:
    """The message for a path that is no run: the path, and the newest runs here."""
    known = sorted(RUNS.glob("*/rows.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = ", ".join(str(file.parent) for file in known[:SHOWN])
    there = f"newest runs here: {names}" if names else f"{RUNS}/ has none here"
    return f"no such run: {run} (give a folder with rows.jsonl, or that file); {there}"
