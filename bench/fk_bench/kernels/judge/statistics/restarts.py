"""Combines runs of the same cases in newly started processes: intervals then include differences between starts.

A kernel of a few microseconds is stable within a process, but in the next one, with other memory addresses, it may
differ by more than the rounds ever show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fk_bench.core.rows import Row, Status
from fk_bench.core.scores import key

Z95 = 1.96


def merged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each case, in the order of their first rows.

    A case must be correct in all runs. Speedups are means (of logarithms) weighted by variance; the variance between
    starts is added to each, and is common to all cases because a single one has too few starts.
    """
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in (r for run in runs for r in run if r.kind == "case"):
        cases.setdefault(key(row), []).append(row)
    timed = {k: found for k, rows in cases.items() if (found := [r for r in rows if "speedup" in r.ci95])}
    between = variance_between([[_log(r) for r in rows] for rows in timed.values()])
    return [_merge(rows, timed.get(k, []), between) for k, rows in cases.items()]


def variance_between(cases: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The variance between starts, in addition to those within them, by the estimator of Paule and Mandel.

    cases  for each case, (value, variance within) of every start
    """
    several = [np.array(c) for c in cases if len(c) > 1]
    degrees = sum(len(c) - 1 for c in several)

    def excess(variance: float) -> float:
        total = 0.0
        for values, within in (c.T for c in several):
            weights = 1 / (within + variance + 1e-12)
            mean = (weights * values).sum() / weights.sum()
            total += float((weights * (values - mean) ** 2).sum())
        return total - degrees

    if not several or excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _log(row: Row) -> tuple[float, float]:
    """The logarithm of a row's speedup, and its variance according to the interval."""
    low, high = row.ci95["speedup"]
    half = (math.log(high) - math.log(max(low, 1e-6))) / 2
    return math.log(row.metrics["speedup"]), (half / Z95) ** 2


def _merge(rows: list[Row], timed: list[Row], between: float) -> Row:
    wrong = [r for r in rows if r.status not in (Status.OK, Status.SKIPPED)]
    if wrong or not timed:
        return (wrong or rows)[-1].model_copy(update={"round": None}, deep=True)
    row = timed[-1].model_copy(update={"round": None}, deep=True)
    values, variances = np.array([_log(r) for r in timed]).T
    weights = 1 / (variances + between + 1e-12)
    mean = float((weights * values).sum() / weights.sum())
    half = Z95 * float(weights.sum()) ** -0.5
    for name in row.metrics:
        row.metrics[name] = float(np.mean([r.metrics[name] for r in timed if name in r.metrics]))
    row.metrics |= {"speedup": math.exp(mean), "starts": len(timed), "between_starts": between**0.5}
    row.ci95["speedup"] = (math.exp(mean - half), math.exp(mean + half))
    row.case["significant"] = abs(mean) > half
    if len(names := sorted({r.baseline or "" for r in timed})) > 1:
        row.baseline = " or ".join(names)
    return row
