"""Correct and wrong outputs, compared with the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.correctness import checks, errors
from fk_bench.kernels.judge.correctness.errors import compare, expect

from fastkernels.core import registry


def judged(change: Any, op: str = "silu_and_mul", dtype: torch.dtype = torch.float32, **more: Any) -> str:
    """The problem that `compare` reports for the correct output after `change`."""
    spec = registry.get(op)
    x = torch.randn(33, 2 * 65, generator=torch.Generator().manual_seed(3)).to(dtype)
    want = expect(spec, spec.cases[0], [x], "op")
    got = want.native[0].clone()
    return compare(spec, spec.cases[0], [change(got)], want, **more).problem


def test_correct_output_passes() -> None:
    assert judged(lambda y: y) == "" and judged(lambda y: y, dtype=torch.bfloat16) == ""


def put(value: float) -> Any:
    def change(y: torch.Tensor) -> torch.Tensor:
        y[4, 5] = value
        return y

    return change


def test_overflow_follows_the_reference() -> None:
    """float16: an activation beyond its range is infinite, so is its scale, and their quotient is NaN."""
    spec = registry.get("silu_mul_quant_fp8")
    case = next(c for c in spec.cases if c.name == "group_48")
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(2996))
    args[0].mul_(64)
    want = expect(spec, case, args, "op")
    got = [t.clone() for t in want.native]
    lost = got[0].float().isnan()
    assert lost.any() and compare(spec, case, got, want).problem == ""
    got[0][tuple((~lost).nonzero()[0].tolist())] = float("nan")
    assert "1 of 1200 values wrong" in compare(spec, case, got, want).problem


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1000.0])
def test_one_wrong_value_is_wrong(value: float) -> None:
    assert "1 of 2145 values wrong" in judged(put(value))
    assert judged(put(value), unchecked=(0,)) == ""


def test_shapes_and_dtypes_are_compared() -> None:
    assert "shape" in judged(lambda y: y[1:])
    assert "float64" in judged(lambda y: y.double())


def test_lower_precision_shows_in_rms_error() -> None:
    said = judged(lambda y: y * (1 + 3e-6 * torch.randn_like(y).sign()))
    assert "relative rms error" in said
    assert judged(lambda y: y * (1 + 3e-6 * torch.randn_like(y).sign()), allowed=3e-6) == ""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, ""),
        (2.0, "output 0: 1 of 4096 values wrong, the largest error is 2; at [60, 1] expected 0, got 2"),
    ],
)
def test_cache_of_which_little_is_written(monkeypatch: pytest.MonkeyPatch, value: float, said: str) -> None:
    """Values that are exact on both sides are left out only where they are the most; the verdict is the same."""
    spec = registry.get("silu_and_mul")
    want = torch.zeros(64, 64, dtype=torch.float64)
    want[3] = torch.linspace(1 / 3, 3, 64)
    expected = errors.Expected([want], {}, lambda: [want.bfloat16()])
    got = expected.native[0].clone()
    got[60, 1] = value
    found = []
    for sparse in (1, 1 << 20):
        monkeypatch.setattr(errors, "SPARSE", sparse)
        found.append(compare(spec, spec.cases[0], [got], expected))
    assert found[0].problem == found[1].problem == said
    assert found[0].rms == pytest.approx(found[1].rms) and found[0].max == found[1].max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", ["linear", "silu_and_mul", "rms_norm"])
def test_verdict_is_the_same_with_rounding_first(op: str, dtype: torch.dtype) -> None:
    """Errors from none to some that are always wrong; honest results of 16 bits need the reference only once."""
    spec = registry.get(op)
    args = spec.inputs(next(c for c in spec.cases if c.name.startswith("odd")), "cpu", torch.Generator())
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    case = spec.case_of(args, "odd")
    usual = expect(spec, case, args, "op")
    problems = []
    for size in (0.0, 1e-7, 1e-6, 1e-4, 4e-3, 8e-3, 0.02, 0.1):
        got = [t * (1 + size * torch.randn(t.shape)).to(t.dtype) for t in usual.native]
        rounding = expect(spec, case, args, "op", [t.dtype for t in usual.native[: len(usual.outputs)]])
        found = compare(spec, case, got, rounding).problem
        assert found == compare(spec, case, got, usual).problem
        assert rounding.needed or not found
        problems.append(found)
    assert not problems[0] and problems[-1]


def test_infinite_values_need_the_reference() -> None:
    """Where rounding gives an infinite value, the reference in that dtype may give another."""
    spec = registry.get("silu_and_mul")
    args = [torch.full((1, 4), 300.0, dtype=torch.float16)]
    want = expect(spec, spec.cases[0], args, "op", [torch.float16])
    assert want.rounded()[0].isinf().all()
    assert compare(spec, spec.cases[0], [t.clone() for t in want.native], want).problem == ""
    finite = expect(spec, spec.cases[0], [a / 100 for a in args], "op", [torch.float16])
    assert not compare(spec, spec.cases[0], finite.rounded(), finite).problem and not finite.needed


def test_distances_of_calls_show_each_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "AT_ONCE", 24)  # two calls at once
    mine = [[torch.ones(3, 4), torch.arange(2)] for _ in range(5)]
    theirs = [[a.clone() for a in outputs] for outputs in mine]
    mine[1][0][2, 3] = 1.5
    mine[2][1][1] = 9
    mine[3][0][0, 0] = torch.nan
    for side in (mine, theirs):
        side[4][0][1, 1] = torch.nan  # on both sides
        side[0][0][0, 0] = torch.inf
    assert checks.Checks.distances(mine, theirs).tolist() == [
        0.0,
        0.5,
        8.0,
        math.inf,
        0.0,
    ]
    empty = [[torch.ones(0, 4)]] * 2
    assert checks.Checks.distances(empty, empty).tolist() == [0.0, 0.0]
    assert checks.Checks.distances([[]] * 2, [[]] * 2).tolist() == [0.0, 0.0]
