"""Calibrated correctness against hand-computed values, and its properties."""

from __future__ import annotations

import math

import pytest
from fk_bench.quality.calibration import Calibration, Quality, correctness, noise_of
from fk_bench.quality.metrics.metric import Value
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("discrepancy", "expected"),
    [
        (0.0, 1.0),
        (0.1, 1.0),
        (0.2, 0.75),
        (0.3, 0.5),
        (0.5, 0.0),
        (1.0, 0.0),
        (math.nan, 0.0),
        (math.inf, 0.0),
    ],
)
def test_correctness_falls_from_noise_to_bound(discrepancy, expected):
    assert correctness(discrepancy, noise=0.1, bound=0.5) == pytest.approx(expected)


@given(*[st.floats(0, 1)] * 3, st.floats(1e-6, 1))
def test_more_discrepancy_never_raises_correctness(a, b, noise, bound):
    low, high = sorted((a, b))
    assert 1 >= correctness(low, noise, bound) >= correctness(high, noise, bound) >= 0


@pytest.mark.parametrize(
    ("noise", "bound"), [(-0.1, 0.5), (math.nan, 0.5), (0.1, 0.0), (0.1, 1.5), (0.1, math.nan)]
)
def test_impossible_calibration_is_refused(noise, bound):
    with pytest.raises(ValueError, match="lies in"):
        correctness(0.1, noise, bound)


def test_noise_is_the_95th_percentile():
    assert noise_of([i / 100 for i in range(101)]) == pytest.approx(0.95)
    for none in ([], [math.nan], [1.5]):
        with pytest.raises(ValueError, match="needs discrepancies"):
            noise_of(none)


def test_item_that_misses_a_fault_is_insensitive():
    seen = Calibration(0.01, 0.1, {"residual": 0.9, "scale": 0.02})
    assert seen.sensitive and seen.unseen == ()
    missed = Calibration(0.01, 0.1, {"residual": 0.9, "scale": 0.0189})
    assert not missed.sensitive and missed.unseen == ("scale",)
    assert not Calibration(0.01, 0.1).sensitive  # no fault was planted
    assert not Calibration(0.2, 0.1, {"residual": 0.9}).sensitive  # the noise hides the bound


def test_result_takes_c_from_the_metric_of_its_family():
    values = {"kl": Value("kl", 0.02, "nats", 0.055), "other": Value("other", 0.0, "share", 1.0)}
    result = Quality("m", "vllm", "kl", values, Calibration(0.01, 0.1, {"residual": 0.9}))
    assert result.c == pytest.approx(0.5) and result.noise == 0.01 and result.sensitive
    with pytest.raises(ValueError, match="discrepancy lies in"):
        Value("kl", 1.0, "nats", 1.1)
