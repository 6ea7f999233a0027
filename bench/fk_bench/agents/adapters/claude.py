"""Claude Code: `claude -p` in the task folder; tokens and cost from its JSON result.

Source of the flags and fields: the documentation of Claude Code's headless mode.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from fk_bench.agents.adapters import task_folder

NETWORK = True
ENV = ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL")
OPTIONS: Mapping[str, str | None] = {"model": "", "program": "claude", "tools": "Bash,Read,Edit,Write"}


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("claude", options, OPTIONS)


def words(options: Mapping[str, str]) -> list[str]:
    """The command line of the program."""
    model = ["--model", options["model"]] if options["model"] else []
    return [
        options["program"], "-p", task_folder.PROMPT, "--output-format", "json", "--permission-mode", "acceptEdits",
        "--allowedTools", options["tools"], *model,
    ]  # fmt: skip


def used(text: str) -> tuple[int, float]:
    """(tokens, dollars) of a result; (0, 0.0) for text that is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0, 0.0
    if not isinstance(found, dict):
        return 0, 0.0
    usage = found.get("usage") or {}
    count = sum(int(v) for k, v in usage.items() if k.endswith("_tokens") and isinstance(v, int))
    return count, float(found.get("total_cost_usd") or 0.0)


def main() -> int:
    done = subprocess.run(
        words(task_folder.options_of(sys.argv)), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    print(done.stdout, flush=True)
    task_folder.usage(*used(done.stdout))
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
