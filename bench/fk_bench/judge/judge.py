"""The judge of ops: for every case a row that says whether a candidate is right, and how fast beside production."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastkernels import registry
from fastkernels.spec import OpSpec
from fk_bench import machine
from fk_bench.rows import Row, Status, Subject

from . import cage, timing
from .cage import CageOptions
from .cases import SOURCES, Trial, trials
from .side import Side, SideError
from .trial import CaseJudge, Checked, Plan, Timed, Wrong
from .zygote import Zygote

DEATHS = 3  # a candidate whose process ended so often is not started again for the op's other cases
OURS = "fastkernels"
PACKAGES = (
    "fastkernels",
    "fk_bench",
    "fk_integrations",
    "vllm",
    "sglang",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "fla",
)


@dataclass(frozen=True)
class Options:
    """How ops are judged.

    device    'cpu' or 'cuda'
    against   'production' (the fastest of what production ships), 'host' or 'reference'
    cases     sources of cases, of judge.cases.SOURCES
    names     only the cases of these names
    rounds    interleaved rounds, each with N and 2N calls of each side
    seconds   that the timed rounds of a case should take at most; three are made in any case
    batch_s   seconds that a batch of N calls should last
    timeout   seconds that a side has for one command (its first call compiles)
    scan      reject what the static scan finds
    python    {'candidate' | 'baseline': interpreter}
    cage      False: the candidate runs as this user, with its network and files
    memory    bytes of inputs and outputs of one case
    """

    device: str = "cpu"
    against: str = "production"
    cases: tuple[str, ...] = SOURCES
    names: tuple[str, ...] = ()
    rounds: int = 10
    timed: bool = True
    seconds: float = 1.0
    batch_s: float = 2e-3
    timeout: float = 120.0
    scan: bool = True
    python: Mapping[str, str] = field(default_factory=dict)
    cage: bool = True
    memory: int = 24 << 30


def judge_ops(
    ops: Sequence[str],
    candidates: Mapping[str, Path] | None = None,
    options: Options | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """A row for every case of these ops, one for each op and one for all; `on_row` gets each as it is made.

    candidates  {op: file}; an op without one runs ours, with the candidates of others inside where it calls them
    Raises UnknownName for an op that does not exist.
    """
    registry.check_names([*ops, *(candidates or ())])
    with Judge(dict(candidates or {}), options or Options(), on_row) as judge:
        for op in ops:
            judge.op(op)
        return judge.finish()


class Judge:
    """Rows of one run; a context manager, because it owns processes."""

    def __init__(
        self,
        candidates: Mapping[str, Path],
        options: Options,
        on_row: Callable[[Row], None] | None = None,
    ) -> None:
        self.candidates, self.options = dict(candidates), options
        self.rows: list[Row] = []
        self._on_row = on_row or (lambda row: None)
        self._run_id = uuid4().hex[:12]
        self._zygotes: dict[str, Any] = {}
        self._arena = os.memfd_create("fk-judge") if options.device == "cpu" else -1

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        if self._arena >= 0:
            os.close(self._arena)

    # -- an op

    def op(self, name: str) -> None:
        """Judge all cases of an op. Everything that goes wrong becomes a row."""
        spec = registry.get(name)
        found = trials(spec, self.options.cases, self.options.device, self.options.names)
        mine = {n: p for n, p in self.candidates.items() if n == name or n in registry.reached(name)}
        if self.options.scan and (reason := _rejected(mine)):
            self._add(self._row(spec, None, Status.REJECTED, reason))
            return
        pair = Pair(self, spec, mine)
        try:
            for trial in found:
                begin = time.perf_counter()
                reason = trial.gpu_only(spec) if self.options.device == "cpu" else None
                if reason is not None:
                    self._add(self._row(spec, trial, Status.SKIPPED, reason))
                    continue
                row = pair.judge(trial)
                row.metrics["wall_s"] = time.perf_counter() - begin
                self._add(row)
        finally:
            pair.close()
        self._add(self._summary(name))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._on_row(row)

    def _row(self, spec: OpSpec, trial: Trial | None, status: Status, reason: str) -> Row:
        case: dict[str, Any] = {"kind": "case", "level": spec.level}
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
        return Row(
            run_id=self._run_id, command="kernels", commit=machine.commit(), machine=machine.machine(),
            versions=machine.interpreter(sys.executable).versions, status=status, reason=reason, case=case,
            subject=Subject(
                op=spec.name, provider="candidate" if path else OURS, candidate=str(path) if path else None
            ),
        )  # fmt: skip

    def _summary(self, name: str) -> Row:
        mine = [r for r in self.rows if r.subject.op == name and r.kind == "case"]
        return self._totals(mine, "op", name)

    def finish(self) -> list[Row]:
        """The row of the whole run, and all rows."""
        self._add(self._totals([r for r in self.rows if r.kind == "case"], "run", None))
        return self.rows

    def _totals(self, mine: list[Row], kind: str, op: str | None) -> Row:
        ran = [r for r in mine if r.status is not Status.SKIPPED]
        failed = [r for r in ran if r.status is not Status.OK]
        row = Row(
            run_id=self._run_id, command="kernels", commit=machine.commit(), machine=machine.machine(),
            versions=machine.interpreter(sys.executable).versions,
            status=Status.FAILED if failed else Status.OK if ran else Status.SKIPPED,
            reason=f"{len(failed)} of {len(ran)} cases" if failed else "",
            subject=Subject(op=op), case={"kind": kind},
            metrics={"cases": len(ran), "failed": len(failed), "not_run": len(mine) - len(ran)},
        )  # fmt: skip
        timed = [(r.metrics["speedup"], r.case.get("weight", 1.0)) for r in ran if "speedup" in r.metrics]
        if timed and (mean := timing.geomean(timed)) is not None:
            row.metrics["speedup_geomean"] = mean
        return row

    # -- processes

    def spawn(self, who: str, files: Sequence[str] = ()) -> Side:
        """A process for one side, in a cage where it sees these files of candidates."""
        python = self.options.python.get(who, sys.executable)
        if python not in self._zygotes:
            self._zygotes[python] = Zygote(python)
        fds = {"arena": self._arena} if self._arena >= 0 else {}
        side = Side(self._zygotes[python].spawn({}, self._cage(files), fds), who, self.options.timeout)
        side.greet()
        return side

    def _cage(self, files: Sequence[str]) -> CageOptions:
        memory = self.options.memory + (16 << 30)  # the slots are shared memory, and count
        options = CageOptions(readable=tuple(files), packages=PACKAGES, memory=memory)
        return options if self.options.cage else replace(options, **dict.fromkeys(cage.STEPS, False))


class Pair:
    """The two processes of an op, started again when one has ended."""

    def __init__(self, judge: Judge, spec: OpSpec, candidates: Mapping[str, Path]):
        self._judge, self.spec, self.candidates = judge, spec, candidates
        self.options = judge.options
        self.sides: dict[str, Side] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.failure: SideError | None = None
        self.deaths = 0
        self.compiled = False

    def close(self) -> None:
        for side in self.sides.values():
            side.close()

    def _side(self, who: str) -> Side:
        if who in self.sides:
            return self.sides[who]
        files = [str(p.resolve()) for p in self.candidates.values()] if who == "candidate" else []
        side = self.sides[who] = self._judge.spawn(who, files)
        mine = {n: str(p.resolve()) for n, p in self.candidates.items()} if who == "candidate" else {}
        against = self.options.against if who == "baseline" else None
        self.loaded[who] = side.ask(
            "load", op=self.spec.name, device=self.options.device, candidates=mine, against=against,
            mode=self.loaded["candidate"]["mode"] if who == "baseline" else None, threads=1,
        )  # fmt: skip
        return side

    def judge(self, trial: Trial) -> Row:
        """The row of one case."""
        if self.failure is not None:
            return self._row(trial, self.failure.status, str(self.failure))
        try:
            candidate, baseline = self._side("candidate"), self._side("baseline")
        except SideError as error:
            self._lost(error, loading=True)
            return self._row(trial, error.status, str(error))
        plan = Plan(
            self.options.device, self.options.rounds, self.options.seconds, self.options.batch_s,
            1024 if self.options.device == "cuda" else 16, self.options.memory,
        )  # fmt: skip
        case = CaseJudge(
            self.spec, trial, candidate, baseline, self.loaded["candidate"]["mode"], plan, self._judge._arena
        )
        checked = timed = None
        status, reason = Status.OK, ""
        try:
            checked = case.check(self.loaded["baseline"]["baselines"], not self.compiled)
            self.compiled = True
            if trial.timed and self.options.timed:
                timed = case.time(checked)
                if timing.unsteady(timed.candidate, timed.baseline, timed.again):
                    timed = case.time(checked)  # once more: something else was running
        except Wrong as error:
            status, reason = Status.WRONG, str(error)
        except SideError as error:
            status, reason = error.status, str(error)
            self._lost(error)
        case.close()
        return self._row(trial, status, reason, checked, timed)

    def _lost(self, error: SideError, loading: bool = False) -> None:
        """After a failure: a process that is gone is started again, unless it keeps dying or cannot even load."""
        if loading:
            self.failure = error
        if error.fatal or loading:
            self.deaths += 1
            self.close()
            self.sides.clear()
            if self.deaths >= DEATHS:
                self.failure = SideError(
                    error.status, f"{error}; not started again after {DEATHS} such ends", True
                )

    def _row(
        self,
        trial: Trial,
        status: Status,
        reason: str,
        checked: Checked | None = None,
        timed: Timed | None = None,
    ) -> Row:
        row = self._judge._row(self.spec, trial, status, reason)
        if checked is not None:
            row.baseline = checked.baseline
            row.case["live"] = checked.live
            row.metrics |= {
                "error_rms": checked.errors.rms, "baseline_error_rms": checked.baseline_errors.rms,
                "error_max": checked.errors.max, "import_s": self.loaded["candidate"]["import_s"],
                "first_s": checked.first_s,
            }  # fmt: skip
        if timed is not None and status is Status.OK:
            self._times(row, trial, timed)
        return row

    def _times(self, row: Row, trial: Trial, timed: Timed) -> None:
        size, work = self.spec.bytes_moved(trial.case), self.spec.flops(trial.case)
        floor = timing.floor_s(
            size, work, trial.case.dtype, row.machine.gpu if self.options.device == "cuda" else None
        )
        problem = timing.unsteady(timed.candidate, timed.baseline, timed.again)
        if problem:
            row.reason = problem
        elif problem := timing.invalid(timed.candidate, timed.baseline, floor):
            row.status, row.reason = Status.INVALID, problem
        row.metrics |= {f"time_us_{k}": v for k, v in timed.candidate.percentiles().items()}
        row.metrics |= {f"baseline_us_{k}": v for k, v in timed.baseline.percentiles().items()}
        row.metrics["calls"] = timed.candidate.n
        row.metrics["intercept_us"] = 1e6 * timed.candidate.intercept
        if problem:
            return
        value, interval = timing.speedup(timed.candidate, timed.baseline)
        noise, around = timing.speedup(timed.again, timed.baseline)
        half = max(abs(noise - 1), (around[1] - around[0]) / 2)
        row.metrics |= {"speedup": value, "noise": half}
        row.ci95["speedup"] = interval
        row.case["significant"] = not interval[0] <= 1 <= interval[1] and abs(value - 1) > abs(noise - 1)
        seconds = timed.candidate.time
        row.metrics |= {"gb_per_s": size / seconds / 1e9, "tflops": work / seconds / 1e12}
        if floor:
            row.metrics |= {"floor_us": 1e6 * floor, "roofline_pct": 100 * floor / seconds}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, str)) else repr(value)[:200]


def _rejected(files: Mapping[str, Path]) -> str:
    from .scan import scan

    findings = [(p, f) for op, p in files.items() for f in scan(Path(p), op) if f.severity == "reject"]
    return "; ".join(f"{p.name}:{f.line}: {f.reason}" for p, f in findings)
