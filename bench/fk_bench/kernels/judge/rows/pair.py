"""The two processes for an op's cases, candidate's and baseline's, and the evidence of each case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.spec import Case, OpSpec
from fk_bench.core.baselines import why_provisional
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.clock import call_times
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.correctness.checks import REFERENCE
from fk_bench.kernels.judge.processes.calling import calling
from fk_bench.kernels.judge.processes.messages import Loaded
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess, TimeBudget
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.rows.case import CaseRun, Plan
from fk_bench.kernels.judge.rows.options import Options
from fk_bench.kernels.judge.rows.verdict import Evidence

DEATHS = 3  # after so many deaths a candidate's process is not restarted for the op's other cases
# CPU rounds are few and short, because every call needs fresh inputs
ROUNDS = {"cpu": (4, 8), "cuda": (5, 100)}  # least and most
BATCH_S = {"cpu": 5e-2, "cuda": 6e-3}  # target seconds of N calls, on a CPU of both sides
PROBE_S = 60.0  # seconds of the candidate's process for `probe`
MAX_CALLS = {"cpu": 20, "cuda": 768}  # N


class Pair:
    """The two processes of an op, restarted when one has ended.

    choice  (provider, parameters): run only this provider of ours instead of the op's default order
    gpu     name of the device, for the floor of a call's time
    """

    def __init__(
        self,
        sides: Sides,
        options: Options,
        spec: OpSpec,
        candidates: Mapping[str, Path],
        choice: tuple[str, dict[str, Any]] | None = None,
        gpu: str | None = None,
    ):
        self._all, self.options, self.spec, self.candidates = sides, options, spec, candidates
        self.choice, self.gpu = choice, gpu
        self.calling = calling(spec, candidates.get(spec.name))
        self.sides: dict[str, RunnerProcess] = {}
        self.loaded: dict[str, Loaded] = {}
        self.failure: RunnerError | None = None
        self.deaths = 0
        # Checked once per op, whichever provider runs; a baseline need not compile.
        self.compiled = choice is not None or options.identity
        self.busy_s = 0.0  # time spent waiting for both processes in the last case
        self.unmade: dict[str, str] = {}  # {baseline: why its library does not load}
        self.uncompiled: set[str] = set()  # compilers that did not compile the reference
        self.budget = TimeBudget(options.op_budget, "op")
        self.deployment: dict[str, str] | None = None  # what the candidate's process reports; see probe

    def close(self, failed: bool = False) -> None:
        """Release both processes: a candidate's ends; ours serves the next op unless something failed."""
        for who, side in self.sides.items():
            if not side.trusted:
                side.close()
            elif failed:
                self._all.lost(who)
        self.sides.clear()

    def _open(self) -> tuple[RunnerProcess, RunnerProcess]:
        """Both processes, loaded. Raises RunnerError."""
        for who in ("candidate", "baseline"):
            if who in self.sides:
                continue
            mine, against = self.candidates, None
            if who == "baseline" or self.options.identity:
                against = self.options.against
                mine = {self.spec.name: Path(against)} if against.endswith(".py") else {}
            side = self._all.spawn(who, list(mine.values())) if mine else self._all.trusted(who)
            self.sides[who] = side
            side.budgets = (self.budget,) if mine and who == "candidate" else ()
            self.loaded[who] = side.ask(
                "load", op=self.spec.name, device=self.options.device,
                candidates={n: str(Path(p).resolve()) for n, p in mine.items()},
                against=None if mine else against, cls=self._cls(who, mine), threads=1,
                choice=self.choice if who == "candidate" else None, model=self.options.model,
            )  # fmt: skip
        return self.sides["candidate"], self.sides["baseline"]

    def _cls(self, who: str, mine: Mapping[str, Path]) -> str | None:
        """The class that this side calls; the baseline is called in the candidate's way."""
        if who == "baseline" and self.calling.cls is not None and self.spec.name in mine:
            return calling(self.spec, mine[self.spec.name]).cls
        return self.calling.cls

    def run(self, trial: Trial) -> tuple[Evidence, CaseRun | None]:
        """The evidence of one case, and the run that made it."""
        self.busy_s = 0.0
        if self.options.device == "cpu" and (reason := trial.gpu_only(self.spec)) is not None:
            return Evidence(refused=(Status.SKIPPED, reason)), None
        if self.calling.problem:
            status = Status.UNSUPPORTED if self.calling.unsupported else Status.SIGNATURE_MISMATCH
            return Evidence(refused=(status, self.calling.problem)), None
        if self.failure is None and self.budget.left <= 0:
            reason = f"not run: the op's {self.budget.seconds:g} s are used"
            self.failure = RunnerError(Status.TIMEOUT, reason, True, "candidate")
        if self.failure is not None:
            return Evidence(failure=self.failure), None
        try:
            candidate, baseline = self._open()
        except RunnerError as error:
            self._lost(error, loading=True)
            return Evidence(failure=error), None
        device = self.options.device
        least, most = ROUNDS[device]
        plan = Plan(
            device, min(self.options.rounds, most), min(least, self.options.rounds), self.options.seconds,
            BATCH_S[device], MAX_CALLS[device], self._all.memory, self.options.hard,
        )  # fmt: skip
        if self.candidates:
            candidate.budgets = (self.budget, TimeBudget(self.options.case_budget, "case"))
        before = candidate.busy_s + baseline.busy_s
        names, last = self._baselines(trial)
        case = CaseRun(
            self.spec,
            trial,
            (candidate, baseline),
            self._all.files,
            self.calling.mode,
            plan,
            self._floor,
            self.options.identity,
            self.calling.cls,
        )
        seen = case.run(names, not self.compiled, self.options.timed, last)
        self.uncompiled |= set(self.loaded["baseline"].compilers) & {*seen.unmade, *seen.uncalled}
        self.unmade |= seen.unmade
        self.compiled = self.compiled or seen.checked is not None
        if seen.failure is not None:
            self._lost(seen.failure)
        if device == "cuda":
            _release()
        self.busy_s = candidate.busy_s + baseline.busy_s - before
        return seen, case

    def probe(self) -> None:
        """Ask the candidate's process whether its kernel runs in compiled code, and what new batch sizes compile.

        A report of the candidate's own process: no verdict or time depends on it.
        """
        if "candidate" not in self.sides or self.failure is not None or self.calling.mode != "op":
            return
        try:
            side = self.sides["candidate"]
            side.budgets = (TimeBudget(min(PROBE_S, max(self.budget.left, 1.0)), "probe"),)
            found = side.ask("deployment")
            self.deployment = {"deployed": found.deployed, "serving": found.serving}
        except RunnerError as error:
            why = f"unknown: {error}"[:160]
            self.deployment = {"deployed": why, "serving": why}
            self._lost(error)

    def _floor(self, case: Case) -> float:
        return call_times.floor_s(self.spec.bytes_moved(case), self.spec.flops(case), case.dtype, self.gpu)

    def _baselines(self, trial: Trial) -> tuple[list[str], list[str]]:
        """Names of the baselines, and those among them that only serve a case if no other one does.

        Compilers take seconds per shape, so all cases but those of models' shapes use them last. One that did not
        compile is not tried again.
        """
        loaded = self.loaded["baseline"]
        names = [n for n in loaded.baselines if n not in self.uncompiled] or [self.options.against]
        return names, [] if "model" in trial.case.tags else loaded.compilers

    @property
    def provisional(self) -> str:
        """Why speedups are no scores; '' if they are, or if the machine has no GPU and makes none."""
        if self.options.device != "cuda" or "baseline" not in self.loaded:
            return ""
        if self.options.against == REFERENCE:
            return "The baseline is plain PyTorch, as --against reference says"
        loaded = self.loaded["baseline"]
        broken = {n: why for n, why in self.unmade.items() if n in loaded.production}
        if set(loaded.production) - set(broken) or not (loaded.missing or broken):
            return ""
        return why_provisional(loaded.missing, broken)

    def _lost(self, error: RunnerError, loading: bool = False) -> None:
        """After a failure: the process is restarted, unless it keeps dying or cannot even load."""
        if loading:
            self.failure = error
        if error.fatal or loading:
            self.deaths += 1
            self.close(failed=True)
            if self.deaths >= DEATHS:
                self.failure = RunnerError(
                    error.status, f"{error}; not restarted after {DEATHS} deaths", True, error.who
                )


def _release() -> None:
    """Free the oracle's GPU memory, which both sides need."""
    import torch

    torch.cuda.empty_cache()
