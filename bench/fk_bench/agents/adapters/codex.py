"""Codex CLI: `codex exec` in the task folder; tokens from its events. Its own sandbox is off, because ours is on.

Source of the flags and events: the documentation of `codex exec` and `exec_events.rs` of openai/codex.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping

from fk_bench.agents.adapters import task_folder

NETWORK = True
ENV = ("OPENAI_API_KEY", "CODEX_API_KEY")
OPTIONS: Mapping[str, str | None] = {"model": "", "program": "codex"}


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("codex", options, OPTIONS)


def words(options: Mapping[str, str]) -> list[str]:
    """The command line of the program."""
    model = ["--model", options["model"]] if options["model"] else []
    return [
        options["program"], "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        *model, task_folder.PROMPT,
    ]  # fmt: skip


def tokens(lines: Iterable[str]) -> int:
    """Input and output tokens of all turns; other lines are ignored."""
    total = 0
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("type") == "turn.completed":
            used = event.get("usage") or {}
            total += int(used.get("input_tokens", 0)) + int(used.get("output_tokens", 0))
    return total


def main() -> int:
    options = task_folder.options_of(sys.argv)
    with subprocess.Popen(
        words(options), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            task_folder.usage(tokens([line]))
    return process.returncode


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
