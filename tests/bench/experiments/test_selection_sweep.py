"""The sweep's points and calls, as far as a CPU can make them; its times need a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.common.graph_clock import Run
from experiments.selection import calls, experts, sweep
from experiments.selection.models import MIXTURES, MODELS

from fastkernels.core.tuning import Chip

CHIP = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)
SUBJECTS = calls.subjects(["row", "block"], [1, 8], [256, 1024])


@pytest.mark.parametrize("op", SUBJECTS)
def test_every_model_has_points_with_candidates(op: str) -> None:
    subject = SUBJECTS[op]
    points = list(subject.points([1, 64]))
    models = {name.partition(":")[0] for point in points for name in point.models}
    assert models == set(MIXTURES if "experts" in op else MODELS)
    assert len({json.dumps([p.shape, p.sizes]) for p in points}) == len(points)
    assert all(subject.candidates(p, CHIP) for p in points)


@pytest.mark.parametrize("op", SUBJECTS)
def test_host_kernels_are_providers_of_the_op(op: str) -> None:
    assert all(calls.provider(SUBJECTS[op].op, name) for name in SUBJECTS[op].hosts)


@pytest.mark.parametrize("op", SUBJECTS)
def test_calls_of_the_smallest_point_are_right(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "depth", lambda size: 2)
    monkeypatch.setattr(experts, "MEMORY", 0)  # one layer's weights for all calls
    options = argparse.Namespace(device="cpu", quick=True, out=tmp_path / "rows.jsonl", seconds=1.0)
    run, subject = Run("test", op, options), SUBJECTS[op]
    point = min(subject.points([1]), key=size_of)
    made = subject.calls(run, point)
    result = subject.reference(*made[0])
    assert result.isfinite().all() and result.shape[0] == 1
    assert len(made) >= 1 and all(isinstance(a, torch.Tensor) for a in made[0][:2])


def size_of(point: calls.Point) -> int:
    size = 1
    for value in (*point.shape.values(), *point.sizes.values()):
        size *= value if isinstance(value, int) and value else 1
    return size


def test_measured_points_are_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert sweep.done(out) == set()
    case = {"kind": "time", "shape": {"N": 8}, "sizes": {"M": 1}, "params": {}}
    out.write_text("\n".join(json.dumps({"case": c}) for c in (case, {**case, "kind": "check"})) + "\n")
    assert sweep.done(out) == {json.dumps([{"N": 8}, {"M": 1}])}
