"""The judge of ops: a row for each case that says whether a candidate is correct, and its speed against production."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from fastkernels.core import registry
from fastkernels.core.candidate import sources
from fastkernels.core.spec import OpSpec
from fk_bench.core import machine
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.scores import score
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.correctness.again import revealed, trial_of
from fk_bench.kernels.judge.correctness.cases import Trial, trials
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.rows import metrics
from fk_bench.kernels.judge.rows.options import Options
from fk_bench.kernels.judge.rows.pair import Pair
from fk_bench.kernels.judge.rows.rank_pair import RankPair
from fk_bench.kernels.judge.rows.rank_pair import trials as rank_trials
from fk_bench.kernels.judge.rows.verdict import decide
from fk_bench.kernels.judge.scan.scan import rejections, scan
from fk_bench.kernels.judge.statistics.restarts import merged

OURS = "fastkernels"


def judge_ops(
    ops: Sequence[str],
    candidates: Mapping[str, Path] | None = None,
    options: Options | None = None,
    on_row: Callable[[Row], None] | None = None,
    sides: Sides | None = None,
) -> list[Row]:
    """Rows of all cases of these ops, one of each op and one of the run; `on_row` gets each as it is made.

    candidates  {op: file}; an op without one runs ours, with the other candidates where it calls them
    sides       processes that stay open, for several runs with equal options of processes; only for one start
    Raises UnknownName for an unknown op.
    """
    registry.check_names([*ops, *(candidates or ())])
    options = options or Options()
    run_id, runs = uuid4().hex[:12], []
    for start in range(options.starts):
        with Judge(dict(candidates or {}), options, on_row, run_id, sides) as judge:
            judge.round = start if options.starts > 1 else None
            for op in ops:
                judge.op(op)
            runs.append(judge.rows)
    if options.starts > 1:
        judge.conclude(merged(runs))
    return judge.finish()


def sides_of(options: Options) -> Sides:
    """The processes for runs with these options: fork servers, and our own code's runners, which keep their imports.

    A candidate's runner belongs to one op of one run. A context manager.
    """
    return Sides(options.device, options.python, options.cage, options.timeout, options.memory)


def python_sources(file: Path) -> list[Path]:
    """The Python files among a candidate's own sources, which are scanned like the candidate."""
    return [f for f in sources(file) if f.suffix == ".py"]


class Judge:
    """The rows of one run; a context manager, because it owns processes, unless `sides` are given."""

    def __init__(
        self,
        candidates: Mapping[str, Path],
        options: Options,
        on_row: Callable[[Row], None] | None = None,
        run_id: str = "",
        sides: Sides | None = None,
    ) -> None:
        self.candidates, self.options = dict(candidates), options
        files = {op: Path(p) for op, p in self.candidates.items()}
        self._digests = {op: digest_of(f) for op, f in files.items() if f.is_file()}
        self.rows: list[Row] = []
        self.round: int | None = None  # number of the start, in all rows
        self._on_row = on_row or (lambda row: None)
        self._run_id = run_id or uuid4().hex[:12]
        self._warnings: list[str] = []  # of the static scan, for the current op's candidates
        self._own_sides = sides is None
        self.sides = sides or sides_of(options)

    def __enter__(self) -> Judge:
        self._threads = torch.get_num_threads()
        if self.sides.core is not None:  # more threads of the oracle would wait for a core that a side uses
            torch.set_num_threads(1)
        if self._own_sides:
            self.sides.begin()  # it imports for seconds, and the cases are listed meanwhile
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        if self._own_sides:
            self.sides.close()

    # -- an op

    def op(self, name: str) -> None:
        """Judge all cases of an op. All failures become rows."""
        spec = registry.get(name)
        o = self.options
        PHASES.take()
        with PHASES.of("list cases"):
            if o.values:
                found = [trial_of(spec, o.values, o.captures)]
            elif spec.ranks:
                found = rank_trials(spec, o)
            else:
                found = trials(spec, o.cases, o.device, o.names, o.captures, o.task, o.most)
        mine = {
            n: p for n, p in self.candidates.items() if n == name or n in registry.reached(name, parts=True)
        }
        findings = (
            {
                f: scan(f, op, alone=len(files) == 1)
                for op, p in mine.items()
                for files in [(Path(p), *python_sources(Path(p)))]
                for f in files
            }
            if self.options.scan
            else {}
        )
        self._warnings = [f"{Path(p).name}: {f}" for p, found_in in findings.items() for f in found_in]
        if rejected := [f"{Path(p).name}: {why}" for p, fs in findings.items() if (why := rejections(fs))]:
            self._add(self.row(spec, None, Status.REJECTED, "; ".join(rejected)))
            return
        pair: Pair | RankPair
        if spec.ranks:
            pair = RankPair(self.sides, self.options, spec, mine, self._gpu())
        else:
            pair = Pair(self.sides, self.options, spec, mine, gpu=self._gpu())
        around = self._judge_cases(pair, found)
        summary = self._summary(name)
        summary.case["seconds"] = _shown(around)
        if pair.deployment is not None:
            summary.case["deployment"] = pair.deployment
        self._add(summary)

    def case(self, name: str, trial: Trial) -> Row:
        """Judge one case of an op without a candidate's file; returns its row."""
        self._warnings = []
        pair = Pair(self.sides, self.options, registry.get(name), {}, gpu=self._gpu())
        self._judge_cases(pair, [trial])
        return self.rows[-1]

    def provider(
        self, name: str, found: Sequence[Trial], provider: str, params: Mapping[str, Any]
    ) -> list[Row]:
        """Judge these cases with one of our providers and its parameters; returns their rows.

        Calls that it does not support are `unsupported`; no other provider runs them.
        """
        before, self._warnings = len(self.rows), []
        choice = (provider, dict(params))
        self._judge_cases(Pair(self.sides, self.options, registry.get(name), {}, choice, self._gpu()), found)
        return self.rows[before:]

    def prepare(self, name: str, trial: Trial, provider: str) -> None:
        """Let both sides import and compile what a case needs, by a check without times and without a row.

        A failure shows again when cases are judged.
        """
        options, choice = replace(self.options, timed=False, hard=0), (provider, dict[str, Any]())
        pair = Pair(self.sides, options, registry.get(name), {}, choice, self._gpu())
        try:
            pair.run(trial)
        finally:
            pair.close()

    def _judge_cases(self, pair: Pair | RankPair, found: Sequence[Trial]) -> Counter[str]:
        """Add the rows of these cases; returns the seconds between them and afterwards, by phase."""
        around: Counter[str] = Counter()
        try:
            for trial in found:
                begin = time.perf_counter()
                around.update(PHASES.take())
                row = self._case(pair, trial)
                if row.status is not Status.SKIPPED:
                    wall = time.perf_counter() - begin
                    row.metrics |= {"wall_s": wall, "overhead_s": max(wall - pair.busy_s, 0.0)}
                    row.case["seconds"] = _shown(PHASES.take())
                if pair.choice is not None:
                    row.subject.provider, row.case["params"] = pair.choice
                self._add(row)
            if self.options.deployment and pair.spec.name in pair.candidates:
                pair.probe()
        finally:
            pair.close()
        around.update(PHASES.take())
        return around

    def _case(self, pair: Pair | RankPair, trial: Trial) -> Row:
        seen, case = pair.run(trial)
        verdict = decide(seen)
        row = self.row(pair.spec, trial, verdict.status, verdict.reason)
        if verdict.status is Status.WRONG and (values := revealed(pair.spec, trial, seen.recipe)):
            row.case["values"] = values
            of = row.subject.candidate
            command = (
                f"fk-bench kernels {pair.spec.name}{f' --candidate {of}' if of else ''} --values {values}"
            )
            sizes = ", ".join(f"{k}={v}" for k, v in row.case["dims"].items())
            row.reason += f" ({sizes}; {row.case['dtype']})\nthe same values again: {command}"
        if case is not None:
            if verdict.speedup:
                row.provisional = pair.provisional
            if verdict.untimed is not None:
                row.case["untimed"] = verdict.untimed.value
            metrics.fill(row, seen, verdict, pair.spec, case.cost, pair.loaded["candidate"].import_s)
            if pair.candidates and seen.checked is not None:
                row.case["candidates"] = {
                    n: 1 if n == pair.spec.name and pair.calling.cls else seen.checked.live.get(n, 0)
                    for n in pair.candidates
                }
        return row

    def _gpu(self) -> str | None:
        return machine.machine().gpu if self.options.device == "cuda" else None

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._on_row(row)

    def row(self, spec: OpSpec, trial: Trial | None, status: Status, reason: str) -> Row:
        case: dict[str, Any] = {"kind": "case", "level": spec.level}
        if self._warnings:
            case["scan"] = self._warnings
        if trial is not None:
            dims = {
                k: v if isinstance(v, (int, float, bool, str)) else repr(v)[:200]
                for k, v in trial.case.dims.items()
            }
            case |= {
                "name": trial.case.name, "source": trial.source, "dims": dims, "dtype": trial.case.dtype,
                "weight": trial.case.weight, "timer": "cpu" if self.options.device == "cpu" else "cuda-graph",
            }  # fmt: skip
        path = self.candidates.get(spec.name)
        if spec.name in self._digests:
            case["digest"] = self._digests[spec.name]
        subject = Subject(
            op=spec.name, provider="candidate" if path else OURS, candidate=str(path) if path else None
        )
        return self._new(status, reason, case, subject)

    def _new(self, status: Status, reason: str, case: dict[str, Any], subject: Subject) -> Row:
        return Row(
            run_id=self._run_id, command="kernels", commit=machine.commit(), machine=machine.machine(),
            versions=machine.interpreter(sys.executable).versions, status=status, reason=reason, case=case,
            subject=subject, round=self.round,
        )  # fmt: skip

    def _summary(self, name: str) -> Row:
        mine = [r for r in self.rows if r.subject.op == name and r.kind == "case"]
        return self._totals(mine, "op", name)

    def conclude(self, cases: list[Row]) -> None:
        """Replace the rows by these, which combine several starts."""
        self.rows, self.round = [], None
        for row in cases:
            self._add(row)
        for op in dict.fromkeys(str(r.subject.op) for r in cases):
            self._add(self._summary(op))

    def finish(self) -> list[Row]:
        """Add the row of the whole run; returns all rows."""
        total = self._totals([r for r in self.rows if r.kind == "case"], "run", None)
        total.case |= {
            "cage": self.sides.cage,
            "against": self.options.against,
            "device": self.options.device,
        }
        if self.options.most:
            total.case["most"] = self.options.most
        self._add(total)
        return self.rows

    def _totals(self, mine: list[Row], kind: str, op: str | None) -> Row:
        total = score(op or "all", mine)
        status = (
            Status.FAILED if total.failed else Status.OK if total.cases > total.not_run else Status.SKIPPED
        )
        row = self._new(
            status,
            f"{total.failed} of {total.cases} cases" if total.failed else "",
            {"kind": kind},
            Subject(op=op),
        )
        row.metrics = {
            "cases": total.cases - total.not_run, "failed": total.failed, "not_run": total.not_run,
        }  # fmt: skip
        if total.speedup is not None:
            row.metrics["speedup_geomean"] = total.speedup
            if total.ci95 is not None:
                row.ci95["speedup_geomean"] = total.ci95
            row.provisional = total.provisional
        return row


def _shown(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase for a row, without phases that take no time."""
    return {phase: round(s, 4) for phase, s in seconds.items() if s >= 5e-4}
