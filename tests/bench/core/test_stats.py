"""Confidence intervals against independently computed values."""

from __future__ import annotations

import random

import pytest
from fk_bench.core.stats import (
    bootstrap_ratio,
    geometric_mean,
    mean_ci,
    paired_ratio,
    percentile_needs,
    t975,
)


def test_student_quantiles() -> None:
    assert t975(2) == 4.303
    assert t975(30) == 2.042
    assert t975(60) == pytest.approx(2.000, abs=2e-3)
    assert t975(1000) == pytest.approx(1.962, abs=1e-3)
    with pytest.raises(ValueError, match="one degree"):
        t975(0)


def test_mean_ci() -> None:
    mean, interval = mean_ci([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert interval == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert mean_ci([5.0]) == (5.0, None)


def test_mean_ci_covers() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        _, interval = mean_ci([rng.gauss(7, 2) for _ in range(3)])
        assert interval is not None
        hits += interval[0] <= 7 <= interval[1]
    assert 925 <= hits <= 975


def test_paired_ratio_covers_with_three_rounds() -> None:
    """A drift of the machine cancels in pairs; the interval of so few pairs covers as often as it claims."""
    rng = random.Random(2)
    hits = 0
    for _ in range(1000):
        drift = [rng.uniform(0.5, 2) for _ in range(3)]
        mine = [1.1 * d * rng.lognormvariate(0, 0.02) for d in drift]
        theirs = [d * rng.lognormvariate(0, 0.02) for d in drift]
        ratio, interval = paired_ratio(mine, theirs)
        assert interval is not None and interval[0] <= ratio <= interval[1]
        hits += interval[0] <= 1.1 <= interval[1]
    assert 920 <= hits <= 980
    assert paired_ratio([3.0], [2.0]) == (1.5, None)
    assert paired_ratio([0.0, 1.0], [1.0, 1.0]) == (0.5, None)
    with pytest.raises(ValueError, match="equal numbers"):
        paired_ratio([1.0], [])


def test_percentile_needs() -> None:
    assert [percentile_needs(p) for p in (50, 90, 95, 99)] == [2, 10, 20, 100]


def test_bootstrap_ratio() -> None:
    ratio, interval = bootstrap_ratio([2.0, 2.2, 2.1], [1.0, 1.1, 1.05])
    assert ratio == pytest.approx(2.0)
    assert interval is not None and interval[0] < 2.0 < interval[1]
    paired, narrow = bootstrap_ratio([2.0, 2.2, 2.1], [1.0, 1.1, 1.05], paired=True)
    assert paired == pytest.approx(2.0)
    assert narrow == pytest.approx((2.0, 2.0))  # a drift that both sides share is no uncertainty of the ratio
    assert bootstrap_ratio([3.0], [2.0, 1.0]) == (2.0, None)


def test_bootstrap_ratio_is_deterministic() -> None:
    a, b = [1.0, 1.5, 0.7], [0.9, 1.1, 1.3]
    assert bootstrap_ratio(a, b) == bootstrap_ratio(a, b)


def test_bootstrap_errors() -> None:
    with pytest.raises(ValueError, match="each side"):
        bootstrap_ratio([], [1.0])
    with pytest.raises(ValueError, match="equal numbers, got 1 and 2"):
        bootstrap_ratio([1.0], [1.0, 2.0], paired=True)


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0])[0] == pytest.approx(4.0)
    assert geometric_mean([2.0, 8.0], [3.0, 1.0])[0] == pytest.approx(2.0**1.5)
    _, interval = geometric_mean([1.0, 1.0], None, [(0.9, 1 / 0.9), (0.9, 1 / 0.9)])
    assert interval == pytest.approx((0.9 ** (0.5**0.5), 0.9 ** -(0.5**0.5)))
    assert geometric_mean([1.5], [2.0], [(1.4, 1.6)])[1] == pytest.approx(
        (1.5 / (1.6 / 1.4) ** 0.5, 1.5 * (1.6 / 1.4) ** 0.5)
    )
    assert geometric_mean([1.0, 2.0], None, [(0.9, 1.1), None])[1] is None
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([])
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, -1.0])
