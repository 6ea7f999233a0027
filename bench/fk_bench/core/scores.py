"""The scores of kernel runs: weighted means of the speedups in their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fk_bench.core import rows, stats
from fk_bench.core.rows import Row, Status, Untimed

NOT_RUN = (Status.SKIPPED, Status.UNSUPPORTED)
FAILED = tuple(s for s in Status if s is not Status.OK and s not in NOT_RUN)
COVERED = 0.8


@dataclass(frozen=True)
class Score:
    """The geometric mean of an op's speedups, or of a run's, weighted by how often production makes each call.

    wanted   cases that can be timed: no extreme values and none without output
    untimed  {why: how many of those have no time}
    provisional  why the mean is no score; '' if it is one
    """

    op: str
    speedup: float | None
    ci95: tuple[float, float] | None
    timed: int
    cases: int
    failed: int
    not_run: int
    wanted: int = 0
    untimed: Mapping[str, int] = field(default_factory=dict)
    provisional: str = ""

    @property
    def why_none(self) -> str:
        """Why there is no mean; '' if there is one, or nothing was to be timed."""
        if self.speedup is not None or not self.wanted:
            return ""
        parts = [f"{n} {why}" for why, n in self.untimed.items()]
        return (
            f"{self.op}: no mean, because {self.timed} of the {self.wanted} cases that can be timed have a time, and"
            f" {COVERED:.0%} must: {', '.join(parts)}"
        )


def key(row: Row) -> tuple[str, str, str, str]:
    """The identity of a row's case: equal for two results of the same case."""
    name = str(row.case.get("name", ""))
    return str(row.subject.op), name, str(row.case.get("source", "")), str(row.case.get("dtype", ""))


def latest(found: Sequence[Row]) -> list[Row]:
    """The last row of each case, in the order of their first rows."""
    return list({key(r): r for r in found if r.command == "kernels" and r.kind == "case"}.values())


def score(op: str, cases: Sequence[Row]) -> Score:
    """The score of these cases. Failed and untimed ones are counted, but not part of the mean.

    There is a mean only if at least COVERED of the cases that can be timed were: otherwise a candidate could leave out
    the cases in which it is slow.
    """
    timed = [r for r in cases if r.status is Status.OK and r.metrics.get("speedup", 0.0) > 0]
    wanted = [
        r for r in cases
        if r.case.get("source") != "extreme" and r.status not in NOT_RUN
        and r.case.get("untimed") not in (Untimed.NOT_WANTED.value, Untimed.NO_OUTPUT.value)
    ]  # fmt: skip
    known = set(map(id, timed))
    untimed = Counter(str(r.case.get("untimed") or r.status.value) for r in wanted if id(r) not in known)
    mean, interval = None, None
    if timed and len(timed) >= COVERED * len(wanted):
        mean, interval = stats.geometric_mean(
            [r.metrics["speedup"] for r in timed],
            [float(r.case.get("weight") or 1.0) for r in timed],
            [r.ci95.get("speedup") for r in timed],
        )
    failed = sum(r.status in FAILED for r in cases)
    not_run = sum(r.status in NOT_RUN for r in cases)
    why = rows.provisional(timed)
    return Score(op, mean, interval, len(timed), len(cases), failed, not_run, len(wanted), dict(untimed), why)


def scores(found: Sequence[Row]) -> tuple[list[Score], Score]:
    """(the score of each op, the score of all cases)."""
    cases = latest(found)
    ops = dict.fromkeys(str(r.subject.op) for r in cases)
    return [score(op, [r for r in cases if r.subject.op == op]) for op in ops], score("all", cases)
