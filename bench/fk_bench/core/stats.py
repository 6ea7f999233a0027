"""Confidence intervals: Student's t for a mean, the bootstrap for ratios, the delta method for a geometric mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal's with a first-order term.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t975(degrees: int) -> float:
    """The 97.5% quantile of Student's t. Raises ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError(f"Student's t needs one degree of freedom or more, got {degrees}")
    return _T975[degrees - 1] if degrees <= len(_T975) else 1.95996 + 2.3723 / degrees


def mean_ci(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The mean and its 95% confidence interval, which is None with fewer than two values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    half = t975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def bootstrap_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    paired: bool = False,
    draws: int = 4000,
    seed: int = 0,
) -> tuple[float, tuple[float, float] | None]:
    """mean(numerator) / mean(denominator) and its 95% bootstrap interval (None with fewer than two values a side).

    paired: value i of both sides is from the same round, so rounds are resampled rather than values.
    """
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if not len(a) or not len(b):
        raise ValueError("a ratio needs a value on each side")
    if paired and len(a) != len(b):
        raise ValueError(f"paired values come in equal numbers, got {len(a)} and {len(b)}")
    below = float(b.mean())
    ratio = float(a.mean()) / below if below else math.nan
    if min(len(a), len(b)) < 2 or not below:
        return ratio, None
    rng = np.random.default_rng(seed)
    i = rng.integers(0, len(a), (draws, len(a)))
    j = i if paired else rng.integers(0, len(b), (draws, len(b)))
    means = b[j].mean(axis=1)
    ratios = a[i].mean(axis=1)[means != 0] / means[means != 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    return ratio, (float(low), float(high))


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """mean(numerator) / mean(denominator) of paired values, and its 95% interval (None with fewer than two pairs).

    Student's t over the logarithms of the pairs' ratios: unlike a bootstrap, it is not too narrow for two or three
    pairs. Without an interval too where a value is not positive. Raises ValueError without pairs.
    """
    a, b = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    if not len(a) or len(a) != len(b):
        raise ValueError(f"paired values come in equal numbers above 0, got {len(a)} and {len(b)}")
    below = float(b.mean())
    ratio = float(a.mean()) / below if below else math.nan
    if len(a) < 2 or not (a > 0).all() or not (b > 0).all():
        return ratio, None
    logs = np.log(a / b)
    half = t975(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return ratio, (ratio * math.exp(-half), ratio * math.exp(half))


def mean_of_means(groups: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float] | None]:
    """The mean of the groups' means and its 95% interval; None without a group of at least two values.

    The degrees of freedom are Welch's and Satterthwaite's. Groups of one value have no variance of their own and take
    the mean variance of the others. Raises ValueError for an empty group, or none.
    """
    if not groups or not all(len(group) for group in groups):
        raise ValueError("a mean of means needs groups of at least one value")
    mean = float(np.mean([np.mean(group) for group in groups]))
    known = [float(np.var(group, ddof=1)) for group in groups if len(group) > 1]
    if not known:
        return mean, None
    usual = float(np.mean(known))
    parts = [(np.var(g, ddof=1) if len(g) > 1 else usual) / len(g) for g in groups]
    below = sum(part**2 / (len(g) - 1) for part, g in zip(parts, groups, strict=True) if len(g) > 1)
    degrees = max(1, int(sum(parts) ** 2 / below)) if below else sum(len(g) - 1 for g in groups)
    half = t975(degrees) * math.sqrt(sum(parts)) / len(groups)
    return mean, (mean - half, mean + half)


def percentile_needs(percent: float) -> int:
    """The least number of values that support a percentile: one of them is expected above it (p99: 100)."""
    return math.ceil(100 / (100 - percent))


def geometric_mean(
    values: Sequence[float],
    weights: Sequence[float] | None = None,
    intervals: Sequence[tuple[float, float] | None] | None = None,
) -> tuple[float, tuple[float, float] | None]:
    """exp(sum(w * log(v)) / sum(w)) and its 95% interval from those of the values; None if any of these is missing.

    The measurements are independent, so the variances of the logarithms add up.
    Raises ValueError without a value, and for values or weights that are not positive.
    """
    v = np.asarray(values, dtype=float)
    w = np.ones(len(v)) if weights is None else np.asarray(weights, dtype=float)
    if not len(v) or len(v) != len(w) or not (v > 0).all() or not (w > 0).all():
        raise ValueError(f"a geometric mean needs positive values and weights, got {list(v)} and {list(w)}")
    w = w / w.sum()
    mean = float(w @ np.log(v))
    if intervals is None or any(i is None or not 0 < i[0] <= i[1] for i in intervals):
        return math.exp(mean), None
    bounds = np.log(np.asarray(intervals, dtype=float))
    half = math.sqrt(float(((w * (bounds[:, 1] - bounds[:, 0]) / 2) ** 2).sum()))
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))
