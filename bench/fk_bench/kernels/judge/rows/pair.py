"""The two processes for an op's cases, one for the candidate and one for the baseline, and the row of each case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastkernels.core.spec import Case, OpSpec
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge.clock import timing
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess
from fk_bench.kernels.judge.rows.case import CaseJudge, Checked, Plan, Timed, Wrong

if TYPE_CHECKING:
    from fk_bench.kernels.judge.rows.judging import Judge

DEATHS = 3  # after so many deaths a candidate's process is not restarted for the op's other cases
MAX_ROUNDS = {"cpu": 5, "cuda": 100}
BATCH_S = {"cpu": 2e-3, "cuda": 6e-3}  # target seconds of N calls
MAX_CALLS = {"cpu": 16, "cuda": 1024}  # of a batch, N


class Pair:
    """The two processes of an op, restarted when one has ended.

    choice  (provider, parameters): run only this provider of ours instead of the op's default order
    """

    def __init__(
        self,
        judge: Judge,
        spec: OpSpec,
        candidates: Mapping[str, Path],
        choice: tuple[str, dict[str, Any]] | None = None,
    ):
        self._run, self.spec, self.candidates = judge, spec, candidates
        self.options, self.choice = judge.options, choice
        self.sides: dict[str, RunnerProcess] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.failure: RunnerError | None = None
        self.deaths = 0
        self.compiled = choice is not None  # checked once per op, whichever provider runs
        self.busy_s = 0.0  # time spent waiting for both processes in the last case

    def close(self, failed: bool = False) -> None:
        """Release both processes: a candidate's ends; ours serves the next op unless something failed."""
        for who, side in self.sides.items():
            if side.caged or (who == "candidate" and self.candidates) or self.options.against.endswith(".py"):
                side.close()
            elif failed:
                self._run.lost(who)
        self.sides.clear()

    def _open(self) -> tuple[RunnerProcess, RunnerProcess]:
        """Both processes, loaded. Raises RunnerError."""
        for who in ("candidate", "baseline"):
            if who in self.sides:
                continue
            mine, against = self.candidates, None
            if who == "baseline":
                against = self.options.against
                mine = {self.spec.name: Path(against)} if against.endswith(".py") else {}
            side = self._run.spawn(who, list(mine.values())) if mine else self._run.trusted(who)
            self.sides[who] = side
            self.loaded[who] = side.ask(
                "load", op=self.spec.name, device=self.options.device,
                candidates={n: str(Path(p).resolve()) for n, p in mine.items()},
                against=None if mine else against,
                mode=self.loaded["candidate"]["mode"] if who == "baseline" else None, threads=1, core=self._run.core,
                choice=self.choice if who == "candidate" else None,
            )  # fmt: skip
        return self.sides["candidate"], self.sides["baseline"]

    def row(self, trial: Trial) -> Row:
        """The row of one case."""
        self.busy_s = 0.0
        if self.failure is not None:
            return self._row(trial, *self._blame(self.failure))
        try:
            candidate, baseline = self._open()
        except RunnerError as error:
            self._lost(error, loading=True)
            return self._row(trial, *self._blame(error))
        plan = Plan(
            self.options.device, min(self.options.rounds, MAX_ROUNDS[self.options.device]), self.options.seconds,
            BATCH_S[self.options.device], MAX_CALLS[self.options.device], self._run.memory,
        )  # fmt: skip
        before = candidate.busy_s + baseline.busy_s
        case = CaseJudge(
            self.spec, trial, candidate, baseline, self.loaded["candidate"]["mode"], plan, self._run.arena
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
                late = timing.charge(timed.candidate, timed.baseline) > 0
                unsteady = timing.unsteady(timed.candidate, timed.baseline, timed.again)
                cuda = self.options.device == "cuda"
                if late or (unsteady if cuda else timing.invalid(timed.candidate, timed.baseline, 0.0)):
                    # once more, after a disturbance; in longer batches the cost of starting them matters less
                    timed = case.time(checked, longer=2 if late else 1)
        except Wrong as error:
            status, reason = Status.WRONG, str(error)
        except RunnerError as error:
            status, reason = self._blame(error)
            self._lost(error)
        except RuntimeError as error:  # in the judge itself: no memory for the oracle
            status, reason = Status.FAILED, f"the judge: {type(error).__name__}: {str(error)[:300]}"
        case.close()
        if self.options.device == "cuda":
            _release()
        self.busy_s = candidate.busy_s + baseline.busy_s - before
        row = self._row(trial, status, reason, checked, timed, case.cost)
        if case.passed_over:
            row.case["passed_over"] = {n: why[:200] for n, why in case.passed_over.items()}
        return row

    def _baselines(self, trial: Trial) -> list[str]:
        """Names of the baselines. Compilers take seconds per shape, so they are used for model shapes only."""
        loaded = self.loaded["baseline"]
        compilers = [] if "model" in trial.case.tags else loaded["compilers"]
        return [n for n in loaded["baselines"] if n not in compilers] or [self.options.against]

    @staticmethod
    def _blame(error: RunnerError) -> tuple[Status, str]:
        """Status and reason of a row; a failure of the baseline is not blamed on the candidate."""
        if error.who == "baseline" and error.status is not Status.UNSUPPORTED:
            return Status.FAILED, f"the baseline: {error.status.value}: {error}"
        return error.status, str(error)

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

    def _row(
        self,
        trial: Trial,
        status: Status,
        reason: str,
        checked: Checked | None = None,
        timed: Timed | None = None,
        cost: Case | None = None,
    ) -> Row:
        row = self._run.row(self.spec, trial, status, reason)
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
        """Calls of each candidate: of its function, or of its class if the case calls the class."""
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
        charged = timing.charge(timed.candidate, timed.baseline)
        if charged:
            row.metrics["charged_us"] = 1e6 * charged
        row.metrics |= {f"time_us_{k}": v + 1e6 * charged for k, v in timed.candidate.percentiles().items()}
        row.metrics |= {f"baseline_us_{k}": v for k, v in timed.baseline.percentiles().items()}
        row.metrics["calls"] = timed.candidate.n
        row.case |= {k: timed.traced[k] for k in ("kernels", "trace") if k in timed.traced}
        row.metrics |= {f"trace_{k}": timed.traced[k] for k in ("call_s", "launches") if k in timed.traced}
        row.metrics["intercept_us"] = 1e6 * timed.candidate.intercept
        row.metrics["baseline_intercept_us"] = 1e6 * timed.baseline.intercept
        if problem:
            return
        value, interval = timing.speedup(timed.candidate, timed.baseline, charged)
        noise, around = timing.speedup(timed.again, timed.baseline)
        half = max(abs(noise - 1), (around[1] - around[0]) / 2)
        row.metrics |= {"speedup": value, "noise": half}
        row.ci95["speedup"] = interval
        row.case["significant"] = not interval[0] <= 1 <= interval[1] and abs(value - 1) > abs(noise - 1)
        seconds = timed.candidate.time + charged
        row.metrics |= {"gb_per_s": size / seconds / 1e9, "tflops": work / seconds / 1e12}
        if floor:
            row.metrics |= {"floor_us": 1e6 * floor, "roofline_pct": 100 * floor / seconds}


def _why(passed_over: Mapping[str, str]) -> str:
    return "no baseline serves this case: " + "; ".join(f"{n}: {r}" for n, r in passed_over.items())


def _release() -> None:
    """Free the oracle's GPU memory, which both sides need."""
    import torch

    torch.cuda.empty_cache()
