"""`fk-bench mcp`: the tasks, the judge and the history of attempts as tools of an MCP server."""

from __future__ import annotations

import functools
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fastkernels.core import registry
from fastkernels.core.registry import UnknownName
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fk_bench.agents import tasks, transcript
from fk_bench.agents.budget import TaskBudget, seconds_of
from fk_bench.agents.loop import MOST_USED, is_count
from fk_bench.agents.session import INDEPENDENT, MODES, Session, Settings
from fk_bench.core.baselines import AGAINST
from fk_bench.core.machine import torch_device
from fk_bench.core.terminal.output import fail
from fk_bench.core.terminal.signals import signals_raise
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge import Options
from fk_bench.kernels.judge.correctness.cases import SOURCES
from fk_bench.kernels.judge.processes.zygote import ZygoteError

MOST_SOURCE = 20 << 20  # bytes
INSTRUCTIONS = (
    "Write faster kernels for ops. list_tasks names the ops, get_task gives the meaning, a correct stub and the rules"
    " of one, submit judges a source, profile adds what was measured, usage reports tokens, history shows all attempts."
    " finish scores the best attempt on cases that no attempt saw, and ends the task."
)
_T = TypeVar("_T")


class Tasks:
    """The tools' state: a session whose tasks start when they are first used. One call at a time."""

    def __init__(self, session: Session, names: list[str]):
        self.session, self.names = session, names
        self._lock = threading.Lock()
        self._done: dict[str, dict[str, Any]] = {}

    def list_tasks(self) -> list[dict[str, Any]]:
        """The ops that can be worked on, with their level and the best attempt so far."""
        return self._alone(lambda: [self._about(n) for n in self.names])

    def get_task(self, op: str) -> dict[str, Any]:
        """All about one op: the statement with rules and cases, the reference and the stub. The budget begins now."""
        return self._alone(lambda: self._task(op))

    def submit(self, op: str, source: str) -> dict[str, Any]:
        """Judge a candidate: the whole text of OP.py. Gives the verdict, the first failing case and the times."""
        return self._alone(lambda: self._submit(op, source, False))

    def profile(self, op: str, source: str) -> dict[str, Any]:
        """Like submit, with all that the judge measured of each case: throughput, roofline, launches, kernels."""
        return self._alone(lambda: self._submit(op, source, True))

    def usage(self, op: str, tokens: int, cost_usd: float = 0.0) -> dict[str, Any]:
        """Report the tokens and dollars that an op has cost since the last report. They count towards its budget."""
        return self._alone(lambda: self._use(op, tokens, cost_usd))

    def history(self, op: str) -> list[dict[str, Any]]:
        """All attempts of an op: verdict, speedup, source, and the attempt that each followed."""
        return self._alone(lambda: self.session.history(self._started(op)))

    def finish(self, op: str) -> dict[str, Any]:
        """Score the best attempt of an op on cases that no attempt saw. The task takes no more attempts."""
        return self._alone(lambda: self._finish(op))

    def close(self) -> None:
        """Score the tasks that were not finished."""
        for op in self.session.tasks:
            if op not in self._done:
                self._finish(op)

    def _alone(self, call: Callable[[], _T]) -> _T:
        with self._lock:
            return call()

    def _known(self, op: str) -> str:
        if op not in self.names:
            raise ValueError(str(UnknownName("task", op, self.names)))
        return op

    def _folder(self, op: str) -> Path:
        return self.session.run / "tasks" / op / "work"

    def _started(self, op: str) -> str:
        if self._known(op) not in self.session.tasks:
            seen, below = self.session.settings.seen, self.session.below(op)
            stub = tasks.write(
                op, self._folder(op), self.session.settings.budget, seen.device, seen.names, below
            )
            self.session.start(op, registry.get(op).level, stub, below)
        return op

    def _about(self, op: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "op": op,
            "level": registry.get(op).level,
            "started": op in self.session.tasks,
        }
        if op in self.session.tasks and (best := self.session.tasks[op].best) is not None:
            found["best"] = {"attempt": best.number, "speedup": best.speedup}
        if op in self._done:
            found["final"] = self._done[op]
        return found

    def _task(self, op: str) -> dict[str, Any]:
        folder = self._folder(self._started(op))
        return {
            "op": op, "statement": (folder / tasks.STATEMENT).read_text(),
            "reference": (folder / "reference.py").read_text(), "stub": (folder / f"{op}.py").read_text(),
            "left": self.session.tasks[op].spent.left(),
        }  # fmt: skip

    def _submit(self, op: str, source: str, profile: bool) -> dict[str, Any]:
        if self._started(op) in self._done:
            raise ValueError(f"the task {op} is finished: {self._done[op]}")
        if len(source.encode(errors="replace")) > MOST_SOURCE:
            return self.session.lose(op, f"the source has more than {MOST_SOURCE >> 20} MB")
        file = self.session.run / "tasks" / op / "taken" / f"{op}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8", errors="replace")
        try:
            return self.session.submit(op, file, profile)
        finally:
            shutil.rmtree(file.parent)

    def _use(self, op: str, tokens: int, cost_usd: float) -> dict[str, Any]:
        if not is_count(tokens, cost_usd):
            raise ValueError(
                f"tokens and cost_usd are 0 to {MOST_USED:g}, got {tokens!r} and {cost_usd!r}"[:200]
            )
        return self.session.use(self._started(op), tokens, float(cost_usd))

    def _finish(self, op: str) -> dict[str, Any]:
        if self._started(op) not in self._done:
            row = self.session.finish(op, {"ended": "finished by the client"})
            self._done[op] = {
                "status": row.status.value, "reason": row.reason, "best": row.case.get("best"), "metrics": row.metrics
            }  # fmt: skip
        return self._done[op]


TOOLS = ("list_tasks", "get_task", "submit", "profile", "usage", "history", "finish")


def server_of(found: Tasks) -> Any:
    """The server with its tools. Raises ModuleNotFoundError without the SDK."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def told(tool: Callable[..., Any]) -> Callable[..., Any]:
        """The tool with errors that the client sees; the SDK hides the text of all others."""

        @functools.wraps(tool)
        def call(*args: Any, **more: Any) -> Any:
            try:
                return tool(*args, **more)
            except (ValueError, OSError, ZygoteError) as error:
                raise ToolError(" ".join(str(error).split())) from error

        return call

    server = MCPServer("fastkernels", instructions=INSTRUCTIONS)
    for name in TOOLS:
        server.tool(name)(told(getattr(found, name)))
    return server


def mcp_command(
    ops: Annotated[str, typer.Option(help="ops, with commas; or blocks of a model (default: all ops)")] = "",
    level: Annotated[int | None, typer.Option(help="all ops of this level; with --model up to 4")] = None,
    model: Annotated[str, typer.Option(help="only ops that this model uses, and its blocks")] = "",
    budget: Annotated[str, typer.Option(help="time of a task from its get_task: 90s, 20m, 1h30m")] = "8h",
    attempts: Annotated[int | None, typer.Option(help="most attempts of a task")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="most tokens of a task, as the client reports them")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="independent, or sequential: winners of lower levels run inside the ops that call them"
        ),
    ] = INDEPENDENT,
    case: Annotated[list[str] | None, typer.Option(help="only cases with this name in attempts")] = None,
    final: Annotated[str, typer.Option(help="sources of the cases of the final score")] = ",".join(SOURCES),
    against: Annotated[str, typer.Option(help="production, host or reference")] = "production",
    rounds: Annotated[int, typer.Option(help="interleaved rounds of each case, at least three")] = 10,
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda if available)")] = "",
    suffix: Annotated[str, typer.Option(help="a label of this run")] = "",
    port: Annotated[
        int, typer.Option(help="serve HTTP on this port of the loopback (0: standard input)")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="folder of the run")] = None,
) -> None:
    """Serve tasks to an agent over the Model Context Protocol, on standard input and output or on a port.

    The run's folder gets rows, sources, a page and the set of winners, like that of `fk-bench agent-loop`.
    """
    try:
        limits = TaskBudget(seconds_of(budget), attempts, tokens)
        if mode not in MODES:
            raise UnknownName("mode", mode, MODES)
        named = tuple(filter(None, map(str.strip, ops.split(","))))
        names, text = tasks.chosen(named, level, model)
        sources = tuple(filter(None, map(str.strip, final.split(","))))
        if unknown := [s for s in sources if s not in SOURCES]:
            raise UnknownName("source of --final", unknown[0], SOURCES)
        if not sources:
            raise ValueError(f"--final {final!r} names no source: give some of {', '.join(SOURCES)}")
        if against not in AGAINST:
            raise UnknownName("baseline of --against", against, AGAINST)
        tasks.check_suffix(suffix)
        if not 0 <= port < 1 << 16:
            raise ValueError(f"--port {port}: give a number from 1 to 65535, or 0 for standard input")
        if rounds < 3:
            raise ValueError(f"--rounds {rounds}: an interval needs at least three")
        tasks.check_cases(names, case or ())
        options = Options(
            device=torch_device(device), against=against, rounds=rounds, model=text, timeout=120.0
        )
    except (UnknownName, CheckpointError, Unsupported, ValueError) as error:
        fail(str(error))
    label = {"agent": "mcp", "command": "", "mode": mode, "suffix": suffix}
    run = out or Path("fk-bench-runs") / time.strftime("mcp-%Y%m%d-%H%M%S")
    if (run / "rows.jsonl").exists():
        fail(f"--out {run}: it already holds a run; choose another folder")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {run}: {error.strerror}")
    with Session(run.resolve(), Settings.of(options, limits, label, tuple(case or ()), sources)) as session:
        found = Tasks(session, names)
        try:
            server = server_of(found)
        except ModuleNotFoundError as error:
            fail(f'the package {error.name} is not installed: pip install "fastkernels[mcp]"')
        print(f"serving {len(names)} tasks; run: {run}", file=sys.stderr, flush=True)
        try:
            with signals_raise():
                server.run(**({"transport": "streamable-http", "port": port} if port else {}))
        except KeyboardInterrupt:
            print("ended; the best attempts are scored now", file=sys.stderr, flush=True)
        found.close()
        if session.tasks:
            session.close()
            print(f"transcript: {printable(str(transcript.write(run)))}", file=sys.stderr, flush=True)
