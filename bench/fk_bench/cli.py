"""`fk-bench`: the commands by name. A command's module is imported only when that command runs."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

# name: (module:function, what it does in a line)
COMMANDS = {
    "doctor": (
        "info.doctor:doctor_command",
        "machine, versions, hosts found, the seams that each will use, what is off and why",
    ),
    "list": (
        "info.listing:list_command",
        "ops, hosts or models; --signatures: how exactly each op matches each host version",
    ),
    "stubs": ("info.stubs:stubs_command", "for each op a candidate file that works, to start from"),
    "export": ("info.export:export_command", "an op as one self-contained file for a fork"),
    "serve": ("serving.serve:serve_command", "an OpenAI-compatible server on our own engine"),
    "serve-compare": (
        "serving.commands:serve_compare_command",
        "real servers side by side: throughput, latency, token agreement",
    ),
    "e2e": (
        "e2e.command:e2e_command",
        "whole models offline, host beside host; --scheduler-only: what a step costs on the CPU",
    ),
    "kernels": (
        "kernels.command:kernels_command",
        "ops judged case by case: a candidate, or ours, against what production runs",
    ),
    "tune": (
        "tune.command:tune_command",
        "measure every provider of an op at a model's shapes, and write the table that dispatch reads",
    ),
    "explain": (
        "explain.command:explain_command",
        "where a model's step goes, module by module: floor, host's time, best provider, predicted gain",
    ),
    "routing": (
        "routing.command:routing_command",
        "captured routing beside uniform-random: load, hot experts, and the time of fused_experts",
    ),
    "capture": (
        "capture.command:capture_command",
        "record what a model asks of each op, in our engine or in a host: shapes, routing, block tables",
    ),
    "diff": ("serving.commands:diff_command", "two runs compared, the regression gate"),
    "report": ("serving.commands:report_command", "the HTML report of a run, made anew from its rows"),
    "tables": (
        "tables.command:tables_command",
        "the tables of README.md and docs/, made anew from bench/results, or checked",
    ),
}
_HELP = "Measure kernels where they are used: alone, in whole models, and in real serving hosts."


def build(only: str | None = None) -> typer.Typer:
    """The application with one command imported, or with all of them (None)."""
    app = typer.Typer(
        name="fk-bench", help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )  # fmt: skip
    app.callback()(_group)
    for name, (where, line) in COMMANDS.items():
        if only is None or name == only:
            app.command(name, short_help=line)(_load(where))
    return app


def _load(where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    return getattr(importlib.import_module(f"fk_bench.{module}"), function)


def _group() -> None:
    pass


_group.__doc__ = _HELP


def __getattr__(name: str) -> Any:
    if name == "app":
        return build()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def overview() -> str:
    lines = "\n".join(f"  {name:<14} {line}" for name, (_, line) in COMMANDS.items())
    return f"{_HELP}\n\nUsage: fk-bench COMMAND [OPTIONS]; fk-bench COMMAND --help for a command's options\n\n{lines}"


def main(argv: list[str] | None = None) -> None:
    """Run one command. Exit status: 0 all well, 1 something failed, 2 a usage error (said in one line)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        raise SystemExit(0 if args else 2)
    if args[0] not in COMMANDS:
        from fastkernels.core.registry import UnknownName

        _end(str(UnknownName("command", args[0], COMMANDS)))
    try:
        status = build(args[0])(args, prog_name="fk-bench", standalone_mode=False)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        # Click's errors, wherever typer takes its click from
        message = getattr(error, "format_message", None)
        if message is None:
            if type(error).__name__ == "Abort":
                raise SystemExit(130) from None
            raise
        _end(f"fk-bench {args[0]}: {message()}")
    raise SystemExit(status if isinstance(status, int) else 0)


def _end(message: str) -> None:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    print(json.dumps({"ok": False, "error": line}))
    raise SystemExit(2)


if __name__ == "__main__":
    main()
