"""An adapter's work in a task folder: read the task, check, report tokens, count lost attempts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROMPT = (
    "Read TASK.md and do the task. Run ./check after each change, and stop when you cannot make it faster."
)


class OptionError(ValueError):
    """An option that an agent does not have, or that is missing."""


def program(name: str, options: Mapping[str, str], known: Mapping[str, str | None]) -> str:
    """The command that runs an adapter as a program with these options. Raises OptionError."""
    if unknown := [n for n in options if n not in known]:
        raise OptionError(f"--agent-option {unknown[0]}: {name} has {', '.join(known)}")
    chosen = {n: options.get(n, default) for n, default in known.items()}
    if missing := [n for n, value in chosen.items() if value is None]:
        raise OptionError(f"--agent {name} needs --agent-option {missing[0]}=VALUE")
    given = json.dumps(chosen)
    return shlex.join([sys.executable, "-m", f"fk_bench.agents.adapters.{name}", given])


def options_of(words: list[str]) -> dict[str, str]:
    """The options that `program` put into the command."""
    return dict(json.loads(words[1]))


def run(main: Callable[[], int]) -> int:
    """Run an adapter as a program; returns its exit code. A failure is one line, the last one that the row shows."""
    try:
        return main()
    except FileNotFoundError as error:
        print(
            f"{error.filename}: no such program or file; --agent-option program=PATH or python=PATH names it"
        )
        return 127
    except (OSError, RuntimeError, ValueError) as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()))
        return 1


def facts() -> dict[str, Any]:
    return dict(json.loads(Path("task.json").read_text()))


def candidate() -> Path:
    return Path(f"{facts()['op']}.py")


def statement() -> str:
    """The whole task as one prompt: the statement, the reference and the stub."""
    file = candidate()
    return (
        f"{Path('TASK.md').read_text()}\n## reference.py\n\n```python\n{Path('reference.py').read_text()}```\n\n"
        f"## {file}\n\n```python\n{file.read_text()}```\n"
    )


def check() -> dict[str, Any]:
    """Judge the candidate as it is now; returns the feedback."""
    return _ask([])


def lost(reason: str) -> dict[str, Any]:
    """Count an attempt without a source."""
    return _ask(["--lost", reason])


def usage(tokens: int, cost_usd: float = 0.0) -> None:
    """Report tokens and dollars used since the last report."""
    if tokens or cost_usd:
        _ask(["--usage", str(tokens), str(cost_usd)])


def _ask(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(["./check", *words], capture_output=True, text=True)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        raise RuntimeError(f"./check failed: {done.stderr[-500:]}") from None


def used_up(answer: Mapping[str, Any]) -> bool:
    """Whether a limit of the budget is reached."""
    return any(value <= 0 for value in answer.get("left", {}).values())
