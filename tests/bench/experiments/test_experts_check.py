"""bench/experiments/selection/experts_check.py and experts.py, on a CPU with small experts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastkernels.core import registry
from fastkernels.core.dispatch import Provider
from fastkernels.core.tuning import Chip
from fastkernels.verify import measure

BENCH = Path(__file__).resolve().parents[3] / "bench"
H200 = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from experiments.selection import experts, experts_check, models

    monkeypatch.setattr(experts, "MIXTURES", {"tiny": models.Mixture(4, 2, 128, 128)})
    monkeypatch.setattr(experts, "COLD", 1 << 10)
    yield experts_check


@pytest.fixture
def run(check: Any, tmp_path: Path) -> Any:
    options = argparse.Namespace(device="cpu", quick=True, out=tmp_path / "rows.jsonl", seconds=60.0)
    return check.Run("experts_check", "fused_experts", options)


@pytest.mark.parametrize("kind", ["bf16", "row", "block", "tensor"])
def test_row_has_the_choice_next_to_the_host(
    check: Any, run: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = check.all_points([3], [kind])
    op, spec = check.experts.op_of(point), registry.get(check.experts.op_of(point).name)

    def ours(*args: Any, **params: Any) -> Any:
        return spec.reference(*args)

    def wrong(*args: Any, **params: Any) -> Any:
        return -spec.reference(*args)

    params = tuple(p for provider in op.providers if provider.name == "triton" for p in provider.params)
    made = [Provider("triton", ours, ("cpu",), params=params), Provider("triton-few", wrong, ("cpu",))]
    monkeypatch.setattr(op, "providers", (*made, Provider("vllm", ours, ("cpu",))))
    monkeypatch.setattr(
        measure,
        "interleaved",
        lambda several, *_: [[3.0] * 30, *([2.0 + i] * 30 for i in range(len(several) - 1))],
    )
    found = check.check(run, point, H200)
    assert found == pytest.approx(1.5)
    rows = [json.loads(line) for line in run.out.read_text().splitlines()]
    *refused, row = rows
    assert [r["status"] for r in refused] == ["wrong"] * len(refused)  # those of few tokens
    assert bool(refused) == (kind == "bf16" and 3 * 2 <= 4)
    assert row["status"] == "ok" and row["case"]["baseline"] == "vllm" and row["case"]["ours"] is True
    assert row["metrics"]["ratio"] == 1.5 and row["ci95"]["ratio"] == [1.5, 1.5]
    assert row["metrics"]["vllm us"] == 3e6 / len(check.experts.calls(run, point))


def test_points_begin_with_few_tokens_in_bfloat16(check: Any) -> None:
    found = check.all_points([1, 8], ["bf16", "block"])
    assert [(p.sizes["tokens"], "block" in p.shape) for p in found] == [
        (1, False),
        (1, True),
        (8, False),
        (8, True),
    ]


def test_a_call_without_a_host_is_unsupported(check: Any, run: Any) -> None:
    (point,) = check.all_points([3], ["bf16"])
    assert check.check(run, point, H200) is None
    assert json.loads(run.out.read_text())["status"] == "unsupported"
