#!/usr/bin/env python3
"""Write the generated pages of the docs site: ops, commands and environment variables, from the code itself.

`make docs` runs it before the build. The pages are not in git: `docs/reference/*.md` but `api.md`.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(" ".join(str(c).split()).replace("|", "\\|") for c in cells) + " |"


def ops() -> str:
    """Every op with its file, and every host class that it replaces."""
    from fastkernels.core import registry

    lines = [
        "# Ops", "",
        "An op is one task with one reference and several implementations. Its file holds the reference, the",
        "kernels and the declaration; the host file in the same folder holds the classes that replace a host's.",
        "`fk-bench list ops` prints this list; `fk-bench list ops --signatures` compares each class with its host's.",
    ]  # fmt: skip
    folder, classes = "", []
    for name in sorted(registry.op_names(), key=lambda n: (op_file(n).parent.name, n)):
        spec, file = registry.get(name), op_file(name)
        if file.parent.name != folder:
            folder = file.parent.name
            lines += ["", f"## {folder}", "", row("op", "level", "file", "purpose"), row(*["---"] * 4)]
        purpose = (inspect.getdoc(sys.modules[registry.op_module(name).__name__]) or "").partition("\n\n")[0]
        lines.append(row(f"`{name}`", spec.level, f"`{file.relative_to(ROOT)}`", purpose))
        classes += [(t, name, registry.target_class(t)) for t in spec.targets]
    lines += [
        "", "# Host classes", "",
        "Classes and functions of a host, and ours that take their place. *By default* is what `patch` does without a",
        "list of ops: replace them, replace them where a tuned table says so, or not. Those for forks only are for",
        "`fk-bench export` and our own engine.",
    ]  # fmt: skip
    host = ""
    for target, name, cls in sorted(classes, key=lambda c: (c[0].host, c[0].path, c[0].cls)):
        if target.host != host:
            host = target.host
            lines += [
                "",
                f"## {host}",
                "",
                row("host's", "ours", "op", "file", "seam", "by default"),
                row(*["---"] * 6),
            ]
        file = Path(inspect.getsourcefile(cls) or "").relative_to(ROOT)
        versions = f" ({target.versions})" if target.versions else ""
        live = target.seam not in ("standalone", "function")
        default = "yes" if target.default else "tuned table" if registry.get(name).tuned_by else "no"
        cells = (f"`{target.path}`{versions}", f"`{target.cls}`", f"`{name}`", f"`{file}`", target.seam)
        lines.append(row(*cells, default if live else "forks only"))
    return "\n".join([*lines, ""])


def op_file(name: str) -> Path:
    from fastkernels.core import registry

    return Path(inspect.getsourcefile(registry.op_module(name)) or "")


def commands() -> str:
    """Every command of fk-bench with its arguments and options."""
    import typer.main
    from fk_bench import cli

    lines = [
        "# Commands", "",
        "Every command runs without options on a small default, prints tables for people and ends standard output with",
        "one line of JSON; `--json` leaves only that line. The exit status is not 0 when anything failed.", "",
        row("command", "purpose"), row("---", "---"),
    ]  # fmt: skip
    lines += [row(f"[`fk-bench {name}`](#fk-bench-{name})", line) for name, (_, line) in cli.COMMANDS.items()]
    for name in cli.COMMANDS:
        command: Any = typer.main.get_command(cli.build(name))
        command = getattr(command, "commands", {name: command})[name]
        lines += ["", f"## fk-bench {name}", "", inspect.cleandoc(command.help or "")]
        lines += ["", row("option", "default", "meaning"), row("---", "---", "---")]
        for p in command.params:
            option = p.param_type_name == "option"
            flags = ", ".join(f"`{f}`" for f in (*p.opts, *p.secondary_opts)) if option else f"`{p.name}`"
            default = (
                "" if p.default in (None, False, (), [], "") or callable(p.default) else f"`{p.default}`"
            )
            lines.append(row(flags, default, getattr(p, "help", None) or ""))
    return "\n".join([*lines, ""])


def environment() -> str:
    """Every variable in the docstring of `fastkernels.core.env.Environment`."""
    from fastkernels.core.env import Environment

    lines = ["# Environment variables", "",
             "`fastkernels.core.env.Environment` reads all of these; child processes inherit them.", "",
             row("variable", "meaning"), row("---", "---")]  # fmt: skip
    found: list[list[str]] = []
    for line in (Environment.__doc__ or "").splitlines():
        match = re.match(r"\s+\w+\s+((?:FASTKERNELS|TRITON)\w*(?:=\S+)?)\s+(.*)", line)
        if match:
            found.append([match[1], match[2]])
        elif found and line.strip():
            found[-1][1] += " " + line.strip()
    found.append(
        ["FASTKERNELS_API_KEY", "the key that clients of `fk-bench serve` must send (as `--api-key`)"]
    )
    return "\n".join([*lines, *(row(f"`{name}`", meaning) for name, meaning in found), ""])


PAGES = {"ops.md": ops, "commands.md": commands, "environment.md": environment}

if __name__ == "__main__":
    for page, make in PAGES.items():
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / page).write_text(make())
        print(f"docs/reference/{page}")
