"""The judge of ops: a row for each case that says whether a candidate is correct, and its speed against production."""

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

import torch

from fastkernels.core import registry
from fastkernels.core.env import Environment
from fastkernels.core.spec import OpSpec
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.kernels.judge.correctness.cases import SOURCES, Trial, trials
from fk_bench.kernels.judge.processes.cage import STEPS, CageOptions, own_home
from fk_bench.kernels.judge.processes.runner_process import RunnerProcess
from fk_bench.kernels.judge.processes.zygote import Zygote
from fk_bench.kernels.judge.rows.pair import Pair
from fk_bench.kernels.judge.scan.scan import rejections, scan
from fk_bench.kernels.judge.statistics.restarts import merged
from fk_bench.kernels.report import score

# Imports that all runner processes need, made once before they are forked; torch.compile alone takes seconds.
PRELOAD = (
    "torch",
    "triton",
    "fastkernels",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "fk_bench.kernels.judge.processes.runner",
)
OURS = "fastkernels"
CPU_MEMORY = 6 << 30  # bytes of a candidate's process
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
    against   'production' (its fastest kernel), 'host', 'reference', or the path of another candidate's file
    captures  folder of captures to replay; None: the shipped ones
    cases     sources of cases, from correctness.cases.SOURCES
    names     only cases with these names
    rounds    interleaved rounds, each with N and 2N calls of each side
    starts    repetitions of everything in new processes; the intervals then include differences between them
    seconds   upper bound for the timed rounds of a case; there are at least three
    timeout   seconds for one command of a side (its first call compiles)
    scan      reject candidates by the static scan
    python    {'candidate' | 'baseline': interpreter}
    cage      False: the candidate runs as this user, with network and files
    memory    bytes of inputs and outputs of one case; None: 2 GiB on a CPU; on a GPU a quarter of its memory,
              at most 8 GiB
    """

    device: str = "cpu"
    against: str = "production"
    cases: tuple[str, ...] = SOURCES
    names: tuple[str, ...] = ()
    captures: Path | None = None
    rounds: int = 10
    starts: int = 1
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
    """Rows of all cases of these ops, one of each op and one of the run; `on_row` gets each as it is made.

    candidates  {op: file}; an op without one runs ours, with the other candidates where it calls them
    Raises UnknownName for an unknown op.
    """
    registry.check_names([*ops, *(candidates or ())])
    options = options or Options()
    run_id, runs = uuid4().hex[:12], []
    for start in range(options.starts):
        with Judge(dict(candidates or {}), options, on_row, run_id) as judge:
            judge.round = start if options.starts > 1 else None
            for op in ops:
                judge.op(op)
            runs.append(judge.rows)
    if options.starts > 1:
        judge.conclude(merged(runs))
    return judge.finish()


class Judge:
    """The rows of one run; a context manager, because it owns processes."""

    def __init__(
        self,
        candidates: Mapping[str, Path],
        options: Options,
        on_row: Callable[[Row], None] | None = None,
        run_id: str = "",
    ) -> None:
        self.candidates, self.options = dict(candidates), options
        self.rows: list[Row] = []
        self.round: int | None = None  # number of the start, in all rows
        self._on_row = on_row or (lambda row: None)
        self._run_id = run_id or uuid4().hex[:12]
        self.memory = options.memory or _memory_of(options.device)
        self.cage: dict[str, str] = {}
        self._warnings: list[str] = []  # of the static scan, for the current op's candidates
        self._zygotes: dict[str, Zygote] = {}
        self._sides: dict[str, RunnerProcess] = {}
        # On a CPU both sides share one core, so that extra threads of a candidate gain nothing.
        self.core = random.choice(sorted(os.sched_getaffinity(0))) if options.device == "cpu" else None
        self.arena = _memory() if options.device == "cpu" else -1

    def __enter__(self) -> Judge:
        self._threads = torch.get_num_threads()
        if self.core is not None:  # more threads of the oracle would wait for a core that a side uses
            torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        for side in self._sides.values():
            side.close()
        for zygote in self._zygotes.values():
            zygote.close()
        if self.arena >= 0:
            os.close(self.arena)

    # -- an op

    def op(self, name: str) -> None:
        """Judge all cases of an op. All failures become rows."""
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
            self._add(self.row(spec, None, Status.REJECTED, "; ".join(rejected)))
            return
        self._judge_cases(Pair(self, spec, mine), found)
        self._add(self._summary(name))

    def provider(
        self, name: str, found: Sequence[Trial], provider: str, params: Mapping[str, Any]
    ) -> list[Row]:
        """Judge these cases with one of our providers and its parameters; returns their rows.

        Calls that it does not support are `unsupported`; no other provider runs them.
        """
        before, self._warnings = len(self.rows), []
        self._judge_cases(Pair(self, registry.get(name), {}, (provider, dict(params))), found)
        return self.rows[before:]

    def _judge_cases(self, pair: Pair, found: Sequence[Trial]) -> None:
        spec = pair.spec
        try:
            for trial in found:
                begin = time.perf_counter()
                not_here = trial.gpu_only(spec) if self.options.device == "cpu" else None
                if not_here is not None:
                    row = self.row(spec, trial, Status.SKIPPED, not_here)
                else:
                    row = pair.row(trial)
                    wall = time.perf_counter() - begin
                    row.metrics |= {"wall_s": wall, "overhead_s": max(wall - pair.busy_s, 0.0)}
                if pair.choice is not None:
                    row.subject.provider, row.case["params"] = pair.choice
                self._add(row)
        finally:
            pair.close()

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
        total.case |= {"cage": self.cage, "against": self.options.against, "device": self.options.device}
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
        return row

    # -- processes

    def spawn(self, who: str, files: Sequence[Path] = ()) -> RunnerProcess:
        """A process for one side, caged if it runs files of a user."""
        python = self.options.python.get(who, sys.executable)
        if python not in self._zygotes:
            self._zygotes[python] = Zygote(python, preload=PRELOAD)
        if files and self.options.cage:
            cuda = self.options.device == "cuda"
            own = Environment.read().tuned  # ops that call others need the tables in the cage, too
            tables = [p] if own and (p := Path(own).expanduser().resolve()).exists() else []
            cage = CageOptions(
                readable=(*(str(f.resolve()) for f in (*files, *tables)), *_toolchain()), packages=PACKAGES,
                memory=None if cuda else CPU_MEMORY,
            )  # fmt: skip
        else:
            off: dict[str, Any] = dict.fromkeys(STEPS, False)
            cage = CageOptions(**off, memory=None, home=None if files else own_home())
        fds = {"arena": self.arena} if self.arena >= 0 else {}
        side = RunnerProcess(
            self._zygotes[python].spawn({}, cage, fds), who, self.options.timeout, cage.mounts
        )
        side.greet()
        if side.caged:
            self.cage = side.cage
        if self.options.device == "cuda":
            side.channel.spin_s = 0.05
        return side

    def trusted(self, who: str) -> RunnerProcess:
        """The process for our own code on one side, shared by all ops while it lives."""
        if who not in self._sides:
            self._sides[who] = self.spawn(who)
        return self._sides[who]

    def lost(self, who: str) -> None:
        """End the trusted process of that side; the next op gets a new one."""
        if (side := self._sides.pop(who, None)) is not None:
            side.close()


def _toolchain() -> list[str]:
    """Folders of a compiler in an unusual place; Triton compiles its launchers with it."""
    names = [os.environ.get("CC"), "gcc", "cc", "clang"]
    found = {Path(p).resolve().parent.parent for n in names if n and (p := shutil.which(n))}
    found |= {Path(p).parent.parent for n in names if n and (p := shutil.which(n))}
    return sorted(str(p) for p in found if p != Path("/") and not p.is_relative_to("/usr"))


def _memory_of(device: str) -> int:
    if device == "cpu":
        return 2 << 30
    return min(torch.cuda.get_device_properties(0).total_memory // 4, 8 << 30)


def _memory() -> int:
    """A memfd that can only grow: shrinking it would end the judge with SIGBUS."""
    fd = os.memfd_create("fk-judge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd
