"""The judge of ops: for every case a row that says whether a candidate is right, and how fast beside production."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastkernels import registry
from fastkernels.spec import Case, OpSpec
from fk_bench import kernels_report, machine
from fk_bench.rows import Row, Status, Subject

from . import timing
from .cage import STEPS, CageOptions
from .cases import SOURCES, Trial, trials
from .scan import rejections, scan
from .side import Side, SideError
from .trial import CaseJudge, Checked, Plan, Timed, Wrong
from .zygote import Zygote

DEATHS = 3  # a candidate whose process ended so often is not started again for the op's other cases
# What every process of a side needs, imported once before they are forked; torch.compile alone takes seconds to import.
PRELOAD = (
    "torch",
    "triton",
    "fastkernels",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "fk_bench.judge.runner",
)
OURS = "fastkernels"
CPU_MEMORY = 6 << 30  # bytes of a candidate's process
MAX_ROUNDS = {"cpu": 5, "cuda": 100}
BATCH_S = {"cpu": 2e-3, "cuda": 6e-3}  # seconds that N calls should last
MAX_CALLS = {"cpu": 16, "cuda": 2048}  # of a batch, N
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
    against   'production' (the fastest of what production ships), 'host', 'reference', or the path of another
              candidate's file
    captures  folder of captures to replay; None: the shipped ones
    cases     sources of cases, of judge.cases.SOURCES
    names     only the cases of these names
    rounds    interleaved rounds, each with N and 2N calls of each side
    seconds   that the timed rounds of a case should take at most; three are made in any case
    timeout   seconds that a side has for one command (its first call compiles)
    scan      reject what the static scan finds
    python    {'candidate' | 'baseline': interpreter}
    cage      False: the candidate runs as this user, with its network and files
    memory    bytes of inputs and outputs of one case; None: 2 GiB on a CPU, 8 GiB or a quarter of it
              on a GPU
    """

    device: str = "cpu"
    against: str = "production"
    cases: tuple[str, ...] = SOURCES
    names: tuple[str, ...] = ()
    captures: Path | None = None
    rounds: int = 10
    timed: bool = True
    seconds: float = 1.0
    timeout: float = 120.0
    scan: bool = True
    python: Mapping[str, str] = field(default_factory=dict)
    cage: bool = True
    memory: int | None = None


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
        self.memory = options.memory or _memory_of(options.device)
        self.cage: dict[str, str] = {}
        self._warnings: list[str] = []  # of the static scan, on the candidates of the op at hand
        self._zygotes: dict[str, Zygote] = {}
        self._sides: dict[str, Side] = {}
        # On a CPU both sides have one core, the same: threads of a candidate's own win nothing there.
        self.core = random.choice(sorted(os.sched_getaffinity(0))) if options.device == "cpu" else None
        self._arena = _memory() if options.device == "cpu" else -1

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides.values():
            side.close()
        for zygote in self._zygotes.values():
            zygote.close()
        if self._arena >= 0:
            os.close(self._arena)

    # -- an op

    def op(self, name: str) -> None:
        """Judge all cases of an op. Everything that goes wrong becomes a row."""
        spec = registry.get(name)
        found = trials(
            spec, self.options.cases, self.options.device, self.options.names, self.options.captures
        )
        mine = {
            n: p for n, p in self.candidates.items() if n == name or n in registry.reached(name, parts=True)
        }
        findings = {p: scan(Path(p), op) for op, p in mine.items()} if self.options.scan else {}
        self._warnings = [f"{Path(p).name}: {f}" for p, found_in in findings.items() for f in found_in]
        if rejected := [f"{Path(p).name}: {why}" for p, fs in findings.items() if (why := rejections(fs))]:
            self._add(self._row(spec, None, Status.REJECTED, "; ".join(rejected)))
            return
        pair = Pair(self, spec, mine)
        try:
            for trial in found:
                begin = time.perf_counter()
                not_here = trial.gpu_only(spec) if self.options.device == "cpu" else None
                if not_here is not None:
                    self._add(self._row(spec, trial, Status.SKIPPED, not_here))
                    continue
                row = pair.judge(trial)
                wall = time.perf_counter() - begin
                row.metrics |= {"wall_s": wall, "overhead_s": max(wall - pair.busy_s, 0.0)}
                self._add(row)
        finally:
            pair.close()
        self._add(self._summary(name))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._on_row(row)

    def _row(self, spec: OpSpec, trial: Trial | None, status: Status, reason: str) -> Row:
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
        subject = Subject(
            op=spec.name, provider="candidate" if path else OURS, candidate=str(path) if path else None
        )
        return self._new(status, reason, case, subject)

    def _new(self, status: Status, reason: str, case: dict[str, Any], subject: Subject) -> Row:
        return Row(
            run_id=self._run_id, command="kernels", commit=machine.commit(), machine=machine.machine(),
            versions=machine.interpreter(sys.executable).versions, status=status, reason=reason, case=case,
            subject=subject,
        )  # fmt: skip

    def _summary(self, name: str) -> Row:
        mine = [r for r in self.rows if r.subject.op == name and r.kind == "case"]
        return self._totals(mine, "op", name)

    def finish(self) -> list[Row]:
        """The row of the whole run, and all rows."""
        total = self._totals([r for r in self.rows if r.kind == "case"], "run", None)
        total.case |= {"cage": self.cage, "against": self.options.against, "device": self.options.device}
        self._add(total)
        return self.rows

    def _totals(self, mine: list[Row], kind: str, op: str | None) -> Row:
        total = kernels_report.score(op or "all", mine)
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
        return row

    # -- processes

    def spawn(self, who: str, files: Sequence[Path] = ()) -> Side:
        """A process for one side; in a cage if it is to run these files of a user's."""
        python = self.options.python.get(who, sys.executable)
        if python not in self._zygotes:
            self._zygotes[python] = Zygote(python, preload=PRELOAD)
        if files and self.options.cage:
            cuda = self.options.device == "cuda"
            cage = CageOptions(
                readable=(*(str(f.resolve()) for f in files), *_toolchain()), packages=PACKAGES,
                memory=None if cuda else CPU_MEMORY,
            )  # fmt: skip
        else:
            off: dict[str, Any] = dict.fromkeys(STEPS, False)
            cage = CageOptions(**off, memory=None)
        fds = {"arena": self._arena} if self._arena >= 0 else {}
        side = Side(self._zygotes[python].spawn({}, cage, fds), who, self.options.timeout, cage.mounts)
        side.greet()
        if side.caged:
            self.cage = side.cage
        if self.options.device == "cuda":
            side.channel.spin_s = 0.05
        return side

    def trusted(self, who: str) -> Side:
        """The process of our own code on one side, the same for all ops as long as it lives."""
        if who not in self._sides:
            self._sides[who] = self.spawn(who)
        return self._sides[who]

    def lost(self, who: str) -> None:
        """End the trusted process of that side; the next op gets another."""
        if (side := self._sides.pop(who, None)) is not None:
            side.close()


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
        self.busy_s = 0.0  # that both processes were waited for in the last case

    def close(self, failed: bool = False) -> None:
        """Let go of both processes: a candidate's ends, ours serves the next op unless something went wrong."""
        for who, side in self.sides.items():
            if side.caged or (who == "candidate" and self.candidates) or self.options.against.endswith(".py"):
                side.close()
            elif failed:
                self._judge.lost(who)
        self.sides.clear()

    def _open(self) -> tuple[Side, Side]:
        """Both processes, loaded. Raises SideError."""
        for who in ("candidate", "baseline"):
            if who in self.sides:
                continue
            mine, against = self.candidates, None
            if who == "baseline":
                against = self.options.against
                mine = {self.spec.name: Path(against)} if against.endswith(".py") else {}
            side = self._judge.spawn(who, list(mine.values())) if mine else self._judge.trusted(who)
            self.sides[who] = side
            self.loaded[who] = side.ask(
                "load", op=self.spec.name, device=self.options.device,
                candidates={n: str(Path(p).resolve()) for n, p in mine.items()},
                against=None if mine else against,
                mode=self.loaded["candidate"]["mode"] if who == "baseline" else None, threads=1, core=self._judge.core,
            )  # fmt: skip
        return self.sides["candidate"], self.sides["baseline"]

    def judge(self, trial: Trial) -> Row:
        """The row of one case."""
        self.busy_s = 0.0
        if self.failure is not None:
            return self._row(trial, *self._blame(self.failure))
        try:
            candidate, baseline = self._open()
        except SideError as error:
            self._lost(error, loading=True)
            return self._row(trial, *self._blame(error))
        plan = Plan(
            self.options.device, min(self.options.rounds, MAX_ROUNDS[self.options.device]), self.options.seconds,
            BATCH_S[self.options.device], MAX_CALLS[self.options.device], self._judge.memory,
        )  # fmt: skip
        before = candidate.busy_s + baseline.busy_s
        case = CaseJudge(
            self.spec, trial, candidate, baseline, self.loaded["candidate"]["mode"], plan, self._judge._arena
        )
        checked = timed = None
        status, reason = Status.OK, ""
        try:
            checked = case.check(self._baselines(trial), not self.compiled)
            self.compiled = True
            if trial.timed and self.options.timed and not checked.seconds:
                reason = "checked, not timed: " + _why(case.passed_over)
            elif trial.timed and self.options.timed:
                timed = case.time(checked)
                unsteady = timing.unsteady(timed.candidate, timed.baseline, timed.again)
                cuda = self.options.device == "cuda"
                if unsteady if cuda else timing.invalid(timed.candidate, timed.baseline, 0.0):
                    timed = case.time(checked)  # once more: something else was running
        except Wrong as error:
            status, reason = Status.WRONG, str(error)
        except SideError as error:
            status, reason = self._blame(error)
            self._lost(error)
        except RuntimeError as error:  # the judge's own work: its oracle's memory
            status, reason = Status.FAILED, f"the judge: {type(error).__name__}: {str(error)[:300]}"
        case.close()
        if self.options.device == "cuda":
            _release()
        self.busy_s = candidate.busy_s + baseline.busy_s - before
        return self._row(trial, status, reason, checked, timed, case.cost)

    def _baselines(self, trial: Trial) -> list[str]:
        """Names to compare with. A compiler takes seconds for every shape: it is asked for model shapes only."""
        loaded = self.loaded["baseline"]
        compilers = [] if "model" in trial.case.tags else loaded["compilers"]
        return [n for n in loaded["baselines"] if n not in compilers] or [self.options.against]

    @staticmethod
    def _blame(error: SideError) -> tuple[Status, str]:
        """Status and reason of a row: what the baseline does wrong is not the candidate's."""
        if error.who == "baseline" and error.status is not Status.UNSUPPORTED:
            return Status.FAILED, f"the baseline: {error.status.value}: {error}"
        return error.status, str(error)

    def _lost(self, error: SideError, loading: bool = False) -> None:
        """After a failure: a process that is gone is started again, unless it keeps dying or cannot even load."""
        if loading:
            self.failure = error
        if error.fatal or loading:
            self.deaths += 1
            self.close(failed=True)
            if self.deaths >= DEATHS:
                self.failure = SideError(
                    error.status, f"{error}; not started again after {DEATHS} such ends", True, error.who
                )

    def _row(
        self,
        trial: Trial,
        status: Status,
        reason: str,
        checked: Checked | None = None,
        timed: Timed | None = None,
        cost: Case | None = None,
    ) -> Row:
        row = self._judge._row(self.spec, trial, status, reason)
        if checked is not None:
            row.baseline = checked.baseline
            row.case["live"] = checked.live
            if self.candidates:
                row.case["candidates"] = self._candidates_live(checked.live)
            row.metrics |= {
                "error_rms": checked.errors.rms, "baseline_error_rms": checked.baseline_errors.rms,
                "error_max": checked.errors.max, "import_s": self.loaded["candidate"]["import_s"],
                "compile_s": checked.first_s,
            }  # fmt: skip
        if timed is not None and status is Status.OK:
            self._times(row, cost or trial.case, timed)
        return row

    def _candidates_live(self, live: Mapping[str, int]) -> dict[str, int]:
        """Calls of each candidate: of its function, or of its class where the case is a call of that."""
        loaded = self.loaded["candidate"]
        calls = {n: live.get(n, 0) if "function" in kind else 0 for n, kind in loaded["offers"].items()}
        if self.spec.name in calls and loaded["mode"] == "module":
            calls[self.spec.name] = 1
        return calls

    def _times(self, row: Row, cost: Case, timed: Timed) -> None:
        size, work = self.spec.bytes_moved(cost), self.spec.flops(cost)
        floor = timing.floor_s(
            size, work, cost.dtype, row.machine.gpu if self.options.device == "cuda" else None
        )
        problem = timing.unsteady(timed.candidate, timed.baseline, timed.again)
        if problem:
            row.reason = problem
        elif problem := timing.invalid(timed.candidate, timed.baseline, floor, timed.traced.get("call_s")):
            row.status, row.reason = Status.INVALID, problem
        row.metrics |= {f"time_us_{k}": v for k, v in timed.candidate.percentiles().items()}
        row.metrics |= {f"baseline_us_{k}": v for k, v in timed.baseline.percentiles().items()}
        row.metrics["calls"] = timed.candidate.n
        row.case |= {k: timed.traced[k] for k in ("kernels", "trace") if k in timed.traced}
        row.metrics |= {f"trace_{k}": timed.traced[k] for k in ("call_s", "launches") if k in timed.traced}
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


def _why(passed_over: Mapping[str, str]) -> str:
    return "no baseline serves this case: " + "; ".join(f"{n}: {r}" for n, r in passed_over.items())


def _release() -> None:
    """What the judge's oracle needed goes back: both sides need memory, too."""
    import torch

    torch.cuda.empty_cache()


def _toolchain() -> list[str]:
    """Folders of a compiler that is not where every machine has it; Triton compiles its launchers with it."""
    names = [os.environ.get("CC"), "gcc", "cc", "clang"]
    found = {Path(p).resolve().parent.parent for n in names if n and (p := shutil.which(n))}
    found |= {Path(p).parent.parent for n in names if n and (p := shutil.which(n))}
    return sorted(str(p) for p in found if p != Path("/") and not p.is_relative_to("/usr"))


def _memory_of(device: str) -> int:
    if device == "cpu":
        return 2 << 30
    import torch

    return min(torch.cuda.get_device_properties(0).total_memory // 4, 8 << 30)


def _memory() -> int:
    """A memfd that can only grow: a side that made it shorter would end the judge with SIGBUS."""
    fd = os.memfd_create("fk-judge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd
