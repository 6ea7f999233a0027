"""`fk-bench`: the commands by name. A command's module is imported only when that command runs."""

from __future__ import annotations

import errno
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from fastkernels.core import multicast
from fk_bench.core.terminal.output import fail
from fk_bench.early import checks

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of a disk
UNUSABLE = (  # of a path
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
    errno.ENOTEMPTY,
)  # fmt: skip
PACKAGES = ("aiohttp", "httpx", "plotly", "psutil", "rich", "tomli")  # of the extra `bench`
SIGNED = ("max_logprobs",)  # -1: no limit, as in vLLM

# name: (module:function, one-line description)
COMMANDS = {
    "doctor": (
        "info.doctor:doctor_command",
        "what works here: machine, hosts, ops that will be replaced, problems; --all: every op and why it is off",
    ),
    "list": (
        "info.listing:list_command",
        "ops, hosts, models or workloads; --signatures: how exactly each op matches each host version",
    ),
    "describe": (
        "info.describe:describe_command",
        "the plan of a model: modules, ops, sizes, cost of a token, and what patch() replaces",
    ),
    "scaffold": (
        "scaffold.command:scaffold_command",
        "a config of transformers becomes a model file of our ops, a list of what is missing, and task files",
    ),
    "stubs": ("info.stubs:stubs_command", "a working candidate file for each op, to start from"),
    "export": ("info.export:export_command", "an op as one self-contained file for a fork"),
    "serve": ("serving.serve:serve_command", "an OpenAI-compatible server on our own engine"),
    "voice": ("serving.voice:voice_command", "a file of a voice for speech, of a recording or of arrays"),
    "serve-compare": (
        "serving.compare.commands:serve_compare_command",
        "real servers compared: throughput, latency, token agreement",
    ),
    "e2e": (
        "e2e.command:e2e_command",
        "whole models offline in several hosts; --scheduler-only: the CPU cost of a step",
    ),
    "patch-compare": (
        "e2e.patch_compare:patch_compare_command",
        "a host against itself, stock and patched in turn, for many models",
    ),
    "quality": (
        "quality.command:quality_command",
        "whether a model's outputs stay right with a set's kernels in a host: calibrated correctness c",
    ),
    "kernels": (
        "kernels.command:kernels_command",
        "judge ops case by case: a candidate, or our own, against production",
    ),
    "tune": (
        "tune.command:tune_command",
        "measure every provider of an op at a model's shapes, and write the table that dispatch reads",
    ),
    "explain": (
        "explain.command:explain_command",
        "where a model's step spends its time: floor, host's time, best provider, predicted gain",
    ),
    "profile": (
        "profile.command:profile_command",
        "what limits an op's kernels or a model's step: counters, kernels by time, gaps, each op against its floor",
    ),
    "coverage": (
        "coverage.command:coverage_command",
        "audit every modeling file of the installed transformers: which architectures our ops can compute",
    ),
    "routing": (
        "routing.command:routing_command",
        "captured and uniform random routing compared: load, hot experts, time of fused_experts",
    ),
    "eval": (
        "evaluate.run.command:eval_command",
        "the score of sets of candidates: speedup, correctness and coverage in whole models and real hosts",
    ),
    "agent-loop": (
        "agents.command:agent_loop_command",
        "an agent's command writes kernels: tasks, checks, budgets, and a score on cases that it did not see",
    ),
    "mcp": (
        "agents.mcp_server:mcp_command",
        "an MCP server with the tasks, the judge and the history of attempts",
    ),
    "board": (
        "board.command:board_command",
        "a static site from rows: rankings, heat map, curves, a page for each set",
    ),
    "submit-check": (
        "board.command:submit_check_command",
        "whether a board takes a submission: files, licence, rows",
    ),
    "agents-table": (
        "board.agents_table:agents_table_command",
        "kernels of agents and libraries compared by level, mode and kind of baseline",
    ),
    "study": (
        "board.study:study_command",
        "time that kernels should save in a host's step of decoding, and that they save, ranked",
    ),
    "track": (
        "track.command:track_command",
        "log runs into MLflow; candidates with their scores and parents: show, best, diff",
    ),
    "capture": (
        "capture.command:capture_command",
        "record the calls that a model makes to each op: shapes, routing, block tables",
    ),
    "trace": (
        "trace.command:trace_command",
        "FlashInfer-Trace data sets: ops, cases, candidates and verdicts exported, those of others imported",
    ),
    "diff": ("serving.compare.commands:diff_command", "compare two runs; the regression gate"),
    "report": ("serving.compare.commands:report_command", "render a run's HTML report again from its rows"),
    "tables": (
        "tables.command:tables_command",
        "generate the tables of README.md and docs/ from bench/results, or check them",
    ),
}
_HELP = "Measure kernels where they are used: alone, in whole models, and in real serving hosts."


def build(only: str | None = None) -> typer.Typer:
    """The application with one command imported, or with all of them (None)."""
    app = typer.Typer(
        name="fk-bench", help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )  # fmt: skip
    app.callback()(_group)
    for name, (where, line) in COMMANDS.items():
        if only is None or name == only:
            app.command(name, short_help=line)(_load(name, where))
    return app


def _load(name: str, where: str) -> Callable[..., Any]:
    module, _, function = where.partition(":")
    command = getattr(importlib.import_module(f"fk_bench.{module}"), function)

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        for option, value in options.items():
            for number in value if isinstance(value, list | tuple) else (value,):
                if (problem := _unusable(option, number)) is not None:
                    _end(f"fk-bench {name}: {problem}")
        multicast.turn_off()  # in all processes that the command starts
        return command(*args, **options)

    return run


def _unusable(name: str, value: Any) -> str | None:
    """Why no command takes this number for an option; None if one may, and for other values."""
    if name in SIGNED or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    waits = name.endswith("timeout") and name != "drain_timeout"  # 0: end at once
    if 0 <= value < math.inf and not (waits and value == 0):
        return None
    expected = "seconds above 0" if waits else "a number of 0 or more"
    return f"--{name.replace('_', '-')}: expected {expected}, got {value:g}"


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
    """Run one command. Exit status: 0 success, 1 a failure, 2 a usage error (a one-line message)."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(args)
        sys.stdout.flush()  # here, where a closed pipe is no error of the interpreter's end
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if error.errno not in FULL:
                raise
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:  # during imports; later ones are click's
        raise SystemExit(130) from None
    raise SystemExit(status)


def _run(args: list[str]) -> int:
    """The exit status of a command line."""
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0 if args else 2
    if args[0] not in COMMANDS:
        from fastkernels.core.registry import UnknownName

        _end(str(UnknownName("command", args[0], COMMANDS)))
    if (wrong := checks.problem(args[0], args[1:])) is not None:
        _end(wrong)
    try:
        status = build(args[0])(args, prog_name="fk-bench", standalone_mode=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in FULL:
            room = "make room, or write elsewhere: --out, FASTKERNELS_CACHE or TMPDIR"
            fail(f"fk-bench {args[0]}: {where}{error.strerror}; {room}", 1)
        if error.errno in UNUSABLE and _is_given(error.filename, args):
            fail(f"fk-bench {args[0]}: {where}{error.strerror}; name another file or folder", 1)
        raise
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        _end(
            f"fk-bench {args[0]} needs {error.name}: pip install 'fastkernels[bench]', or that package alone"
        )
    except Exception as error:
        # Click's errors, whichever click typer uses
        message = getattr(error, "format_message", None)
        if message is None:
            if type(error).__name__ == "Abort":
                raise SystemExit(130) from None
            raise
        _end(f"fk-bench {args[0]}: {message()}")
    return status if isinstance(status, int) else 0


def _is_given(path: object, args: list[str]) -> bool:
    """Whether an error's path is one of the command line, or below one: an error of the user's, not of ours."""
    if not isinstance(path, str | os.PathLike):
        return False
    place = os.path.abspath(str(path))
    words = {part for word in args for part in (word, word.partition("=")[2]) if part}
    bases = {os.path.abspath(os.path.expanduser(word)) for word in words}
    return any(os.path.commonpath((base, place)) == base for base in bases)


def _end(message: str) -> NoReturn:
    line = " ".join(message.split())
    fail(line)


if __name__ == "__main__":
    main()
