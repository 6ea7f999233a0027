"""`fk-bench agent-loop`: an agent's command works on task folders, and its best kernels become a set."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fastkernels.core.registry import UnknownName
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fk_bench.agents import adapters, tasks, transcript
from fk_bench.agents.budget import TaskBudget, seconds_of
from fk_bench.agents.loop import Command, Loop
from fk_bench.agents.session import COMMAND, INDEPENDENT, MODES, Session, Settings, failure
from fk_bench.core.baselines import AGAINST
from fk_bench.core.machine import torch_device
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge import Options
from fk_bench.kernels.judge.correctness.cases import SOURCES
from fk_bench.kernels.judge.processes.zygote import ZygoteError
from fk_bench.track import store

MOST_COMMAND = 32 << 10  # bytes of JSON: they go through a pipe that holds 64 KiB


def agent_loop_command(
    command: Annotated[
        str, typer.Option(help="a shell command that edits the candidate in the current folder")
    ] = "",
    agent: Annotated[
        str, typer.Option(help=f"instead of --command, a known agent: {', '.join(adapters.NAMES)}")
    ] = "",
    agent_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the agent, such as model=NAME; repeatable")
    ] = None,
    ops: Annotated[str, typer.Option(help="ops, with commas; or blocks of a model, as in llama.mlp")] = "",
    level: Annotated[int | None, typer.Option(help="all ops of this level; with --model up to 4")] = None,
    model: Annotated[str, typer.Option(help="only ops that this model uses, and its blocks")] = "",
    begin: Annotated[
        Path | None, typer.Option(help="a folder of candidates OP.py to start from, instead of stubs")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="independent, or sequential: winners of lower levels run inside the ops that call them"
        ),
    ] = INDEPENDENT,
    budget: Annotated[str, typer.Option(help="time of a task with its checks: 90s, 20m, 1h30m")] = "20m",
    attempts: Annotated[int | None, typer.Option(help="most attempts of a task")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="most tokens of a task, as the agent reports them")
    ] = None,
    suffix: Annotated[
        str, typer.Option(help="a label of this run, to compare two settings of one agent")
    ] = "",
    case: Annotated[list[str] | None, typer.Option(help="only cases with this name in attempts")] = None,
    final: Annotated[str, typer.Option(help="sources of the cases of the final score")] = ",".join(SOURCES),
    against: Annotated[str, typer.Option(help="production, host or reference")] = "production",
    rounds: Annotated[int, typer.Option(help="interleaved rounds of each case, at least three")] = 10,
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda if available)")] = "",
    network: Annotated[bool, typer.Option("--network", help="the command may reach servers")] = False,
    env: Annotated[list[str] | None, typer.Option(help="name of a variable that the command gets")] = None,
    readable: Annotated[
        list[Path] | None, typer.Option(help="a file or folder that the command sees read-only")
    ] = None,
    no_cage: Annotated[
        bool, typer.Option("--no-cage", help="run the command as this user; candidates stay caged")
    ] = False,
    track: Annotated[
        bool, typer.Option("--track", help="log the run into MLflow (also with MLFLOW_TRACKING_URI)")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the run")] = None,
    json: Annotated[bool, typer.Option("--json", help="only the line of JSON on standard output")] = False,
) -> None:
    """Let an agent write kernels, and score the best of each task on cases that it did not see.

    Each op is a task: a folder with its meaning, a correct stub, examples and `check`, which judges the candidate and
    prints JSON. The run has a set of the winners, rows, and a page with every attempt. The exit status is 1 if the
    command fails, or if a task has no right attempt.
    """
    try:
        limits = TaskBudget(seconds_of(budget), attempts, tokens)
        what = _command(command, agent, agent_option or (), network, env or (), readable or (), not no_cage)
        if mode not in MODES:
            raise UnknownName("mode", mode, MODES)
        if rounds < 3:
            raise ValueError(f"--rounds {rounds}: an interval needs at least three")
        sources = tuple(filter(None, map(str.strip, final.split(","))))
        if unknown := [s for s in sources if s not in SOURCES]:
            raise UnknownName("source of --final", unknown[0], SOURCES)
        if not sources:
            raise ValueError(f"--final {final!r} names no source: give some of {', '.join(SOURCES)}")
        if against not in AGAINST:
            raise UnknownName("baseline of --against", against, AGAINST)
        tasks.check_suffix(suffix)
        named = tuple(filter(None, map(str.strip, ops.split(","))))
        if not (named or level or model):
            raise ValueError("give --ops OP,OP, --level or --model: a run has at least one task")
        names, text = tasks.chosen(named, level, model)
        options = Options(
            device=torch_device(device), against=against, rounds=rounds, model=text, timeout=120.0
        )
        label = {"agent": agent or "command", "command": command or agent, "mode": mode, "suffix": suffix}
        settings = Settings.of(options, limits, label, tuple(case or ()), sources)
        tasks.check_cases(names, case or ())
        if begin is not None and not any((begin / f"{n}.py").is_file() for n in names):
            raise ValueError(
                f"--begin {begin}: there is no file for {', '.join(names)}, such as {begin / names[0]}.py"
            )
    except (UnknownName, CheckpointError, Unsupported, ValueError) as error:
        fail(str(error))
    run = out or Path("fk-bench-runs") / time.strftime(f"agents-%Y%m%d-%H%M%S{'-' * bool(suffix)}{suffix}")
    if (run / "rows.jsonl").exists():
        fail(f"--out {run}: it already holds a run; choose another folder")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {run}: {error.strerror}")
    start = time.perf_counter()
    try:
        with Session(run.resolve(), settings) as session:
            done = [_task(session, name, what, begin) for name in names]
            session.close()
    except ZygoteError as error:
        fail(" ".join(str(error).split()))
    page = transcript.write(run)
    if store.wanted(track):
        store.track(run)
    if not json:
        table(f"Tasks of {label['agent']}", transcript.COLUMNS, [transcript.cells(r) for r in done])
    ok = all(r.status is Status.OK for r in done)
    last_line({
        "command": COMMAND, "ok": ok, "device": options.device, "tasks": [_result(r) for r in done],
        "set": str(run / "set"), "rows": str(run / "rows.jsonl"), "transcript": str(page),
        "seconds": round(time.perf_counter() - start, 1),
    })  # fmt: skip
    if not ok:
        raise SystemExit(1)


def _task(session: Session, name: str, what: Command, begin: Path | None) -> Row:
    """One task from its folder to its final row. A command that fails ends this task only."""
    spec, home = registry.get(name), session.run / "tasks" / name
    below, seen = session.below(name), session.settings.seen
    own = None if begin is None else begin / f"{name}.py"
    own = own if own is not None and own.is_file() else None
    stub = tasks.write(name, home / "work", session.settings.budget, seen.device, seen.names, below, own)
    session.start(name, spec.level, stub, below)
    ended = Loop(session, name, home / "work", what, home / "agent.log").run()
    row = session.finish(name, ended.as_case())
    if ended.code not in (0, None):
        typer.echo(f"{name}: the command ended with exit code {ended.code}:\n{ended.tail}", err=True)
    typer.echo(f"{name}: {transcript.line(row)}", err=True)
    return row


def _command(
    command: str, agent: str, agent_options: Sequence[str], network: bool, env: Sequence[str],
    readable: Sequence[Path], caged: bool,
) -> Command:  # fmt: skip
    if bool(command) == bool(agent):
        raise ValueError("give --command SHELL-COMMAND, or --agent NAME")
    if command and agent_options:
        raise ValueError("--agent-option belongs to --agent")
    if missing := [p for p in readable if not p.exists()]:
        raise ValueError(f"--readable {missing[0]}: there is no such file or folder")
    if here := _of_this_folder(command):
        raise ValueError(
            f"--command {command!r} runs in the task's folder, which has no {here}: "
            f"name {Path(here).resolve()}, and give --readable {here}"
        )
    names = list(env)
    if agent:
        known = adapters.find(agent)
        given = dict(o.partition("=")[::2] for o in agent_options)
        command, network = known.command(given), network or known.NETWORK
        names += [n for n in known.ENV if n in os.environ]
    if unset := [n for n in names if n not in os.environ]:
        raise ValueError(f"--env {unset[0]}: this variable is not set")
    if (size := len(jsonlib.dumps([command, *(os.environ[n] for n in names)]))) > MOST_COMMAND:
        raise ValueError(
            f"--command and the variables of --env have {size} bytes as JSON, at most {MOST_COMMAND}: put them"
            " into a script"
        )
    return Command(
        command, network, {n: os.environ[n] for n in names}, [str(p.resolve()) for p in readable], caged
    )


def _of_this_folder(command: str) -> str:
    """A file of the current folder in the words of a command; a task has files of some names, too."""
    try:
        words = shlex.split(command)
    except ValueError:  # the shell knows better
        return ""
    tasks_own = ("check", "TASK.md", "task.json", "reference.py", "feedback.json")
    # os.path: a word may be too long for a path
    return next(
        (w for w in words if not w.startswith("/") and os.path.isfile(w) and Path(w).name not in tasks_own),
        "",
    )


def _result(row: Row) -> dict[str, Any]:
    """A task in the last line; text that the agent chose is printable."""
    found: dict[str, Any] = {
        "op": row.subject.op,
        "status": row.status.value,
        "reason": printable(row.reason),
    }
    found |= {
        "best": row.case.get("best"),
        "exit_code": row.case.get("exit_code"),
        "ended": row.case.get("ended"),
        "tail": row.case.get("tail", "") if failure(row.case) else "",
    }
    return jsonlib.loads(jsonlib.dumps(found | {"metrics": row.metrics}))
