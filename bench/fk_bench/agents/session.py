"""Tasks under work: each attempt is judged and kept; the best one is judged again on cases that no attempt saw."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastkernels.core.candidate import sources_folder
from fk_bench.agents import feedback
from fk_bench.agents.budget import Spent, TaskBudget
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.correctness.cases import SOURCES
from fk_bench.profile import judged

COMMAND = "agent-loop"
ATTEMPT, TASK, RUN = "attempt", "task", "run"  # case['kind'] of this command's rows
SEEN = ("random", "extreme")  # sources of the cases of attempts; the final score has all
STUB = 0  # number of the attempt that is the stub


@dataclass(frozen=True)
class Settings:
    """The part that all tasks of a run share.

    seen, final   options of the judge for attempts, and for the best attempt
    label         of rows: agent, mode, suffix, model, author's own words
    """

    seen: Options
    final: Options
    budget: TaskBudget
    label: Mapping[str, str]

    @classmethod
    def of(
        cls, options: Options, budget: TaskBudget, label: Mapping[str, str], names: tuple[str, ...] = (),
        final: tuple[str, ...] = SOURCES,
    ) -> Settings:  # fmt: skip
        """names: only these cases in attempts."""
        seen = dataclasses.replace(options, cases=SEEN if not names else ("random",), names=names)
        return cls(seen, dataclasses.replace(options, cases=final, names=()), budget, label)


@dataclass(frozen=True)
class Attempt:
    """One judged source. `parent` is the attempt that was the best one before; None for the stub."""

    number: int
    digest: str
    file: Path
    parent: int | None
    status: Status
    feedback: Mapping[str, Any]
    seconds: float

    @property
    def speedup(self) -> float | None:
        found = self.feedback.get("speedup")
        return found if isinstance(found, float) and self.status is Status.OK else None


@dataclass
class Task:
    """One op under work, in `folder` of the run. below: winners of lower levels, which the judge uses with it."""

    op: str
    level: int
    folder: Path
    spent: Spent
    below: Mapping[str, Path] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # reasons of attempts without a source

    @property
    def best(self) -> Attempt | None:
        """The fastest right attempt. Without times the latest right one; the stub only if there is no other."""
        right = [a for a in self.attempts if a.status is Status.OK]
        timed = [a for a in right if a.speedup is not None]
        if timed:
            return max(timed, key=lambda a: (a.speedup or 0.0, -a.number))
        return right[-1] if right else None


class Session:
    """The judge, the rows and the tasks of a run; a context manager, because the judge owns processes."""

    def __init__(self, run: Path, settings: Settings):
        self.run, self.settings = run, settings
        self.path = run / "rows.jsonl"
        self.tasks: dict[str, Task] = {}
        self._judge = Judge({}, settings.seen)
        self._own: list[Row] = []

    def __enter__(self) -> Session:
        self._judge.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._judge.__exit__(kind, error, trace)

    def start(self, op: str, level: int, stub: Path, below: Mapping[str, Path] | None = None) -> Task:
        """Begin a task. The stub is judged as attempt 0, so that a gain over it is known; then the budget begins."""
        task = Task(op, level, self.run / "tasks" / op, Spent(self.settings.budget), dict(below or {}))
        self.tasks[op] = task
        self._attempt(task, stub)
        task.spent = Spent(self.settings.budget)
        return task

    def submit(self, op: str, file: Path, profile: bool = False) -> dict[str, Any]:
        """Judge a source; returns the feedback. A source that was judged before gets its feedback again, at no cost."""
        task = self.tasks[op]
        if (why := task.spent.used_up) and digest_of(file) not in {a.digest for a in task.attempts}:
            return self._answer(
                task, {"op": op, "verdict": "not judged", "reason": f"the budget is used up: {why}"}
            )
        digest = digest_of(file)
        known = next((a for a in task.attempts if a.digest == digest), None)
        if known is None:
            task.spent.attempts += 1
            known = self._attempt(task, file)
        found = dict(known.feedback)
        if not profile:
            found.pop("profile", None)
        return self._answer(task, {"attempt": known.number, **found})

    def lose(self, op: str, reason: str) -> dict[str, Any]:
        """Count an attempt that brought no source, such as an answer of an endpoint that came too late."""
        task, reason = self.tasks[op], printable(reason, 500)
        task.spent.attempts += 1
        task.lost.append(reason)
        self._add(self._row(task, ATTEMPT, Status.FAILED, reason, {"lost": True}))
        return self._answer(task, {"op": op, "verdict": "no source", "reason": reason})

    def use(self, op: str, tokens: int, cost_usd: float) -> dict[str, Any]:
        """Add tokens and cost, as the agent reports them."""
        spent = self.tasks[op].spent
        spent.tokens += max(0, tokens)
        spent.cost_usd += max(0.0, cost_usd)
        return self._answer(self.tasks[op], {"op": op})

    def history(self, op: str) -> list[dict[str, Any]]:
        return [
            {
                "attempt": a.number, "parent": a.parent, "verdict": a.status.value, "speedup": a.speedup,
                "digest": a.digest, "source": a.file.read_text(errors="replace"),
            }
            for a in self.tasks[op].attempts
        ]  # fmt: skip

    def finish(self, op: str, end: Mapping[str, Any]) -> Row:
        """Judge the best attempt on all cases, and keep it in the run's set if it is right there; returns the row.

        The row has failed if the command did, or if no attempt was right.

        end  how the agent ended: its exit code and its last lines
        """
        task = self.tasks[op]
        best = task.best
        metrics = {
            "attempts": float(task.spent.attempts), "seconds": task.spent.seconds, "tokens": float(task.spent.tokens),
            "cost_usd": task.spent.cost_usd,
        }  # fmt: skip
        if (stub := task.attempts[STUB].speedup) is not None:
            metrics["stub_speedup"] = stub
        broken = failure(end)
        if best is None or best.number == STUB:
            status, why = _without_winner(task)
            if broken:
                status, why = Status.FAILED, f"{broken}; {why}"
            row = self._row(task, TASK, status, why, {**end, "best": None})
            row.metrics = metrics
            self._add(row)
            return row
        made = self._judged(task, best.file, self.settings.final)
        append(self.path, made)
        cases = [r for r in made if r.kind == "case"]
        found = feedback.of_rows(op, cases)
        status = feedback.verdict(cases)
        right = status is Status.OK
        reason = found["first_failure"]["reason"] if "first_failure" in found else ""
        if broken:  # a winner from before the failure stays one
            status = Status.FAILED if right else status
            reason = f"{broken}; {f'attempt {best.number} is kept' if right else reason}"
        row = self._row(
            task,
            TASK,
            status,
            reason,
            {**end, "best": best.number, "digest": best.digest, "feedback": found},
        )
        row.subject.candidate = str(best.file)
        row.metrics = metrics | ({"speedup_geomean": found["speedup"]} if "speedup" in found else {})
        if best.speedup is not None:
            row.metrics["seen_speedup"] = best.speedup
        if "speedup_95" in found:
            row.ci95["speedup_geomean"] = tuple(found["speedup_95"])
        row.provisional = found.get("provisional", "")
        self._add(row)
        if right:
            copy_candidate(best.file, self.run / "set" / f"{op}.py")
        return row

    def close(self, message: str = "") -> Row:
        """Add the row of the whole run."""
        done = [r for r in self._own if r.kind == TASK]
        failed = sum(r.status is not Status.OK for r in done)
        row = self._row(
            None,
            RUN,
            Status.FAILED if failed else Status.OK,
            message,
            {"tasks": [r.subject.op for r in done]},
        )
        row.metrics = {"tasks": float(len(done)), "failed": float(failed)}
        for name in ("attempts", "seconds", "tokens", "cost_usd"):
            row.metrics[name] = sum(r.metrics.get(name, 0.0) for r in done)
        self._add(row)
        return row

    # -- inside

    def _add(self, row: Row) -> None:
        self._own.append(row)
        append(self.path, [row])

    def _attempt(self, task: Task, file: Path) -> Attempt:
        number = len(task.attempts)
        before = task.best
        kept = copy_candidate(file, task.folder / "attempts" / f"{number:03d}" / f"{task.op}.py")
        begin = time.perf_counter()
        cases = [r for r in self._judged(task, kept, self.settings.seen) if r.kind == "case"]
        found = feedback.of_rows(task.op, cases)
        found["profile"] = judged.profile(cases)
        made = Attempt(
            number, digest_of(kept), kept, None if before is None else before.number, feedback.verdict(cases), found,
            time.perf_counter() - begin,
        )  # fmt: skip
        task.attempts.append(made)
        (kept.parent / "feedback.json").write_text(json.dumps(found, indent=1))
        reason = found["first_failure"]["reason"] if "first_failure" in found else ""
        row = self._row(
            task, ATTEMPT, made.status, reason,
            {"attempt": number, "parent": made.parent, "digest": made.digest, "stub": number == STUB},
        )  # fmt: skip
        row.subject.candidate = str(kept)
        row.metrics = {"cases": found["cases"], "failed": found["failed"], "judge_s": made.seconds}
        if made.speedup is not None:
            row.metrics["speedup_geomean"] = made.speedup
        self._add(row)
        return made

    def _judged(self, task: Task, file: Path, options: Options) -> list[Row]:
        """Rows of the op's cases and of the op, with this file and the winners below it."""
        judge = self._judge
        judge.options = options
        judge.candidates = {**task.below, task.op: file}
        before = len(judge.rows)
        judge.op(task.op)
        return judge.rows[before:]

    def _row(self, task: Task | None, kind: str, status: Status, reason: str, case: Mapping[str, Any]) -> Row:
        template = self._judge.rows[-1]
        where = {} if task is None else {"level": task.level}
        return template.model_copy(
            update={
                "command": COMMAND, "status": status, "reason": printable(reason), "metrics": {}, "ci95": {},
                "baseline": None, "round": None, "provisional": "",
                "subject": Subject(op=None if task is None else task.op, provider=self.settings.label.get("agent")),
                "case": {"kind": kind, **where, **self.settings.label, **case},
            }
        )  # fmt: skip

    def _answer(self, task: Task, found: dict[str, Any]) -> dict[str, Any]:
        best = task.best
        found["best"] = None if best is None else {"attempt": best.number, "speedup": best.speedup}
        found["left"] = task.spent.left()
        return found


def failure(end: Mapping[str, Any]) -> str:
    """The exit code and the last line of a command that failed; '' if it did not, or was ended at the limit of time."""
    if end.get("exit_code") in (0, None):
        return ""
    lines = str(end.get("tail", "")).strip().splitlines()
    said = f": {lines[-1]}" if lines else " and printed nothing"
    return f"the command ended with exit code {end['exit_code']}{said}"


def _without_winner(task: Task) -> tuple[Status, str]:
    """The status and reason of a task whose best attempt is the stub, or that has no right attempt."""
    own, stub = task.attempts[STUB + 1 :], task.attempts[STUB]
    if any(a.status is Status.OK for a in own):
        return Status.OK, "no attempt is faster than the stub"
    made = len(own) + len(task.lost)
    if not made:
        return Status.FAILED, "the agent made no attempt"
    why = next((a.feedback["first_failure"]["reason"] for a in own if "first_failure" in a.feedback), "")
    why = why or (task.lost[-1] if task.lost else own[-1].status.value)
    also = "" if stub.status is Status.OK else "; the stub is not right, either"
    return Status.FAILED, f"no attempt of {made} was right: {why}{also}"


def copy_candidate(file: Path, to: Path) -> Path:
    """Copy a candidate and its own folder of sources; returns the copy."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
    if (own := sources_folder(file)).is_dir():
        shutil.rmtree(sources_folder(to), ignore_errors=True)
        shutil.copytree(own, sources_folder(to))
    return to
