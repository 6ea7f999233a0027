"""Tests of the judge itself: every known cheat must be caught, and its honest twin must pass."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.core.registry import UnknownName
from fk_bench.core.checkout import checkout_path
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.scan.scan import REJECT, scan

CHEATS = "tests/cheats"
NO_GAIN = "no-gain"  # correct, and no faster than its honest twin
# Other load on the machine may make a twin's times invalid, stop a cheat for another reason than the expected one, or
# show a gain that a second measurement does not.
TRIES = 3
# Seconds of a cheat's case, so that one that waits ends soon; more if its twin's took long, as on a busy machine
BUDGET_S, BUDGET_OF_TWIN = {"cpu": 10.0, "cuda": 60.0}, 3
NOISE = 0.25  # a smaller gain cannot be told from noise in the few timed rounds


@dataclass(frozen=True)
class Cheat:
    """One line of catalogue.json, which leaves out defaults.

    name     of the candidate NAME.py and of its honest twin honest/NAME.py
    op, case, sources   what it is judged on; case None: all cases of these sources
    device   where it works
    ranks    processes of a collective; 0 for other ops
    pattern, seen_in    what it does, and where it was seen
    scan     the pattern for which the static scan rejects it; None if no scan can
    caught   accepted verdicts of the judge without the scan: statuses, or 'no-gain'
    """

    name: str
    op: str
    case: str | None
    pattern: str
    seen_in: str
    caught: tuple[str, ...]
    sources: tuple[str, ...] = ("random",)
    device: str = "cpu"
    ranks: int = 0
    scan: str | None = None

    def file(self, honest: bool = False, folder: Path | None = None) -> Path:
        folder = folder or checkout_path(CHEATS)
        return folder / "honest" / f"{self.name}.py" if honest else folder / f"{self.name}.py"


def catalogue(folder: Path | None = None) -> list[Cheat]:
    """All cheats. Raises FileNotFoundError outside a checkout."""
    entries = json.loads(((folder or checkout_path(CHEATS)) / "catalogue.json").read_text())
    lists = ("sources", "caught")
    return [Cheat(**{**e, **{k: tuple(e[k]) for k in lists if k in e}}) for e in entries]


@dataclass
class CheatVerdict:
    """The outcomes of a cheat (without the scan) and of its twin (with it), and what is wrong with each, or ''."""

    cheat: Cheat
    outcome: str = ""
    problem: str = ""
    twin_outcome: str = ""
    twin_problem: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def try_cheat(
    judge: Judge,
    cheat: Cheat,
    options: Options,
    folder: Path | None = None,
    twins: dict[tuple[Any, ...], list[Row]] | None = None,
) -> CheatVerdict:
    """Judge the twin with the scan, the cheat without it, and scan the cheat.

    twins: rows of the twins that passed. If no times are compared, a twin with the same code is not judged again.
    """
    verdict = CheatVerdict(cheat)
    twin = cheat.op, cheat.case, cheat.sources, cheat.ranks, _code(cheat.file(True, folder))
    honest = twins.get(twin, []) if twins is not None and NO_GAIN not in cheat.caught else []
    for _ in range(0 if honest else TRIES):
        honest = _rows(judge, cheat, cheat.file(True, folder), dataclasses.replace(options, scan=True))
        if not any(r.status is Status.INVALID for r in honest):
            break
    bad = [r for r in honest if r.status is not Status.OK]
    if twins is not None and not bad:
        twins[twin] = honest
    verdict.twin_outcome = _outcome(honest)
    verdict.twin_problem = f"the honest twin is {bad[0].status.value}: {bad[0].reason}" if bad else ""
    if not honest:
        verdict.twin_problem = "no case was judged"
    took = max((r.metrics.get("wall_s", 0.0) for r in honest), default=0.0)
    budget = min(options.case_budget, max(BUDGET_S[options.device], BUDGET_OF_TWIN * took))
    hasty = dataclasses.replace(options, scan=False, case_budget=budget)
    for _ in range(TRIES):
        rows = _rows(judge, cheat, cheat.file(False, folder), hasty)
        verdict.outcome = _outcome(rows)
        found = {r.status.value: r.reason for r in rows if r.status is not Status.OK}
        if found:
            shown = "; ".join(f"{status} ({reason})" for status, reason in sorted(found.items()))
            verdict.problem = "" if found.keys() & set(cheat.caught) else f"caught as {shown}"
        elif NO_GAIN not in cheat.caught:
            verdict.problem = "it was accepted as correct"
            break
        else:
            verdict.problem = _gain(rows, honest)
        if not verdict.problem and (found or any("speedup" in r.metrics for r in rows)):
            break  # without a time, nothing shows that it does not gain
    for name, of in (("speedup", rows), ("twin_speedup", honest)):
        if values := [r.metrics["speedup"] for r in of if "speedup" in r.metrics]:
            verdict.metrics[name] = values[0]
    patterns = {f.pattern for f in scan(cheat.file(False, folder), cheat.op) if f.severity == REJECT}
    if (cheat.scan is None and patterns) or (cheat.scan is not None and cheat.scan not in patterns):
        verdict.problem += f"; the scan finds {sorted(patterns) or 'nothing'}, not {cheat.scan or 'nothing'}"
    verdict.problem = verdict.problem.removeprefix("; ")
    return verdict


def _code(file: Path) -> str:
    """A file's code without its docstring and comments."""
    tree = ast.parse(file.read_text())
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.unparse(tree)


def _rows(judge: Judge, cheat: Cheat, file: Path, options: Options) -> list[Row]:
    names = () if cheat.case is None else (cheat.case,)
    judge.candidates = {cheat.op: file}
    judge.options = dataclasses.replace(options, cases=cheat.sources, names=names, ranks=cheat.ranks)
    before = len(judge.rows)
    judge.op(cheat.op)
    return [r for r in judge.rows[before:] if r.kind == "case" and r.status is not Status.SKIPPED]


def _gain(rows: list[Row], honest: list[Row]) -> str:
    """Return a problem that states what the cheat gains, or that its times do not tell; '' if it gains nothing.

    It gains if its speedup is above its twin's, or its time below those of its twin and of the baseline.
    """
    twins = {r.case["name"]: r for r in honest}
    for row in rows:
        twin = twins.get(row.case["name"])
        if "speedup" not in row.metrics:
            continue
        best = max(1.0, twin.ci95["speedup"][1] if twin is not None and "speedup" in twin.ci95 else 1.0)
        found, least = row.metrics["speedup"], row.ci95["speedup"][0]
        if least > best * (1 + NOISE):
            return f"it gains: {found:.2f} (at least {least:.2f}), but its honest twin at most {best:.2f}"
        if found > best * (1 + NOISE):
            return f"it may gain: {found:.2f} (at least {least:.2f}), and its honest twin at most {best:.2f}"
        most, its = row.metrics["time_us_p80"], row.metrics["baseline_us_p20"]
        its = min(its, twin.metrics.get("time_us_p20", 0.0) if twin is not None else 0.0)
        if most * (1 + NOISE) < its:
            return (
                f"it gains: its calls take at most {most:.2f} us, those of its honest twin and of the baseline "
                f"at least {its:.2f}"
            )
    return ""


def _outcome(rows: list[Row]) -> str:
    row = next((r for r in rows if r.status is not Status.OK), rows[0] if rows else None)
    return "" if row is None else f"{row.status.value}: {row.reason}" if row.reason else row.status.value


def run_cheats(
    options: Options,
    out: Path,
    quiet: bool = False,
    folder: Path | None = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Judge the cheats of this device; writes a row for each and for its twin to `out`, a line to standard error.

    names: only these. Returns {ok, cheats, caught, twins, passed, not_run, seconds}; not_run counts those for another
    device. Raises UnknownName.
    """
    start, known = time.perf_counter(), catalogue(folder)
    for name in names:
        if name not in (every := [c.name for c in known]):
            raise UnknownName("cheat", name, every)
    found = [c for c in known if not names or c.name in names]
    here = [c for c in found if c.device == options.device]
    verdicts = []
    with Judge({}, options) as judge:
        for number, cheat in enumerate(here, 1):
            verdict = try_cheat(judge, cheat, options, folder)
            verdicts.append(verdict)
            append(out, _result(judge, verdict))
            if not quiet:
                print(f"{number:3d}/{len(here)} {line(verdict)}", file=sys.stderr, flush=True)
    caught = sum(not v.problem for v in verdicts)
    passed = sum(not v.twin_problem for v in verdicts)
    return {
        "ok": bool(here) and caught == passed == len(here),
        "cheats": len(here), "caught": caught, "twins": len(here), "passed": passed,
        "not_run": len(found) - len(here), "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def line(verdict: CheatVerdict) -> str:
    """One line for people."""
    name = f"{verdict.cheat.name:20s} {verdict.cheat.op:14s}"
    cheat = f"NOT CAUGHT ({verdict.problem})" if verdict.problem else "caught"
    twin = f"REFUSED ({verdict.twin_problem})" if verdict.twin_problem else "passed"
    return printable(f"{name} {cheat}: {printable(verdict.outcome, 100)} | twin {twin}")


def _result(judge: Judge, verdict: CheatVerdict) -> Iterable[Row]:
    cheat = verdict.cheat
    template = judge.rows[-1]
    for twin, problem, said in (
        (False, verdict.problem, verdict.outcome),
        (True, verdict.twin_problem, verdict.twin_outcome),
    ):
        yield template.model_copy(
            update={
                "status": Status.FAILED if problem else Status.OK,
                "reason": problem or said,
                "subject": Subject(op=cheat.op, provider="twin" if twin else "cheat", candidate=cheat.name),
                "case": {
                    "kind": "cheat", "pattern": cheat.pattern, "seen_in": cheat.seen_in, "scan": cheat.scan,
                    "expected": list(cheat.caught), "twin": twin,
                },
                "metrics": {} if twin else verdict.metrics,
                "ci95": {},
                "baseline": None,
            }
        )  # fmt: skip
