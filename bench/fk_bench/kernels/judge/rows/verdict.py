"""The status of a case: one function, from what the judge saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fk_bench.core.rows import Status, Untimed
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.clock import call_times
from fk_bench.kernels.judge.correctness.checks import Checked, Chosen
from fk_bench.kernels.judge.processes.runner_process import RunnerError


@dataclass
class Evidence:
    """Everything that the judge saw of a case.

    refused  status and reason of a case that was not run, because there is no way to call it
    failure  a process failed; wrong: an output was, with the `recipe` of its values; broken: the judge itself failed
    chosen   the baseline, with `passed_over` {another: why not}: `unmade` do not load, and calls of `uncalled` fail
    checked: the candidate's first calls
    timed    the times; None if none were wanted, or the checks ended before
    floor_s  lower bound of a correct call on this machine; 0 if unknown
    estimates  of a collective: {baseline: rough seconds of a call}; link_gb_per_s: what its GPUs can send, 0 if unknown
    """

    refused: tuple[Status, str] | None = None
    failure: RunnerError | None = None
    wrong: str = ""
    recipe: dict[str, Any] | None = None
    broken: str = ""
    chosen: Chosen = field(default_factory=Chosen)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    unmade: Mapping[str, str] = field(default_factory=dict)
    uncalled: Mapping[str, str] = field(default_factory=dict)
    checked: Checked | None = None
    wants_times: bool = False
    has_output: bool = True
    timed: Timed | None = None
    floor_s: float = 0.0
    estimates: Mapping[str, float] = field(default_factory=dict)
    link_gb_per_s: float = 0.0


@dataclass(frozen=True)
class CaseVerdict:
    """The status, its reason, and whether the times may be shown as a speedup; if not, `untimed` says why."""

    status: Status
    reason: str = ""
    speedup: bool = False
    untimed: Untimed | None = None


def decide(seen: Evidence) -> CaseVerdict:
    """The verdict. Claims of a process are in `failure` and `timed.traced` only, and make no verdict better."""
    if seen.refused is not None:
        return CaseVerdict(*seen.refused)
    if seen.failure is not None:
        error = seen.failure
        if error.who == "baseline" and error.status is not Status.UNSUPPORTED:  # not the candidate's fault
            return CaseVerdict(Status.FAILED, f"the baseline: {error.status.value}: {error}")
        return CaseVerdict(error.status, str(error))
    if seen.broken:
        return CaseVerdict(Status.FAILED, f"the judge: {seen.broken}")
    if seen.wrong:
        return CaseVerdict(Status.WRONG, seen.wrong)
    if seen.checked is None:
        return CaseVerdict(Status.FAILED, "the judge: the case ended without a check")
    if not seen.has_output:
        return CaseVerdict(Status.OK, untimed=Untimed.NO_OUTPUT)
    if not seen.wants_times:
        return CaseVerdict(Status.OK, untimed=Untimed.NOT_WANTED)
    if seen.timed is None:
        why = "; ".join(f"{n}: {r}" for n, r in seen.passed_over.items())
        reason = f"checked, not timed: no baseline serves this case: {why}"
        return CaseVerdict(Status.OK, reason, untimed=Untimed.NO_BASELINE)
    times = seen.timed
    off = "" if times.priority == "on" else f" (real-time priority is {times.priority})"
    if why := call_times.unsteady(times.baseline, times.again):
        return CaseVerdict(Status.OK, why + off, untimed=Untimed.UNSTEADY)
    if why := call_times.unresolved(times.candidate, times.baseline):
        return CaseVerdict(Status.OK, why + off, untimed=Untimed.UNRESOLVED)
    if why := call_times.invalid(
        times.candidate, times.baseline, seen.floor_s, times.traced.call_s, times.traced.launches
    ):
        return CaseVerdict(Status.INVALID, why)
    said = [] if times.candidate.steady else ["the candidate's times scatter; its 80th percentile is counted"]
    if (alone := call_times.counted_alone(times.candidate, times.baseline)) is not None:
        slope = times.candidate.time
        counted = slope + alone.of(call_times.charge(times.candidate, times.baseline))
        said.append(
            f"counted: alone, {1e6 * counted:.1f} us a call; in a batch, where calls overlap, {1e6 * slope:.1f} us"
        )
    return CaseVerdict(Status.OK, "; ".join(said), True)
