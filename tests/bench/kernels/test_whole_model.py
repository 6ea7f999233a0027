"""Level 4: logits of a whole model with candidates against those without, and the speed of the engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fk_bench.core.rows import Row, Status
from fk_bench.info import model_blocks, stubs
from fk_bench.kernels import whole_model
from fk_bench.kernels.whole_model import Found, Place
from fk_bench.quality.calibration import Calibration
from fk_bench.quality.metrics.outputs import Scores
from fk_bench.quality.text import Extent

SCALE = Calibration(0.01, 0.1, {"scale": 0.5})
PLACES = {"decode": [Place("decode", i // 4, 7 + i % 4) for i in range(8)]}
SCALED = """
from fastkernels.overrides.block import vllm


class VllmLlamaMLP(vllm.VllmLlamaMLP):
    def forward(self, x):
        return super().forward(x) * FACTOR
"""


def scores(logits: torch.Tensor) -> dict[str, Scores]:
    return {"decode": Scores(logits, torch.zeros(len(logits), dtype=torch.long), [1] * len(logits))}


def compared(change: torch.Tensor) -> Found:
    want = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)) * 3
    (found,) = whole_model.compare(scores(want), scores(want + change), PLACES, SCALE)
    return found


def test_equal_logits_pass() -> None:
    found = compared(torch.zeros(8, 33))
    assert found.c == 1 and not found.first


def test_first_differing_place_has_expected_and_got() -> None:
    change = torch.zeros(8, 33)
    change[5:, ::2] += 4.0
    found = compared(change)
    assert found.c < 0.9
    assert found.first.startswith("decode: sequence 1, token 8: expected token ")
    assert ", got " in found.first and found.first.endswith("3 of 8 places differ")


def test_nan_is_a_difference() -> None:
    change = torch.zeros(8, 33)
    change[2, 3] = math.nan
    found = compared(change)
    assert found.c == 0 and "sequence 0, token 9" in found.first and "1 of 8" in found.first


def judged(model: str, files: dict[str, Path], timed: bool) -> list[Row]:
    text, _ = model_blocks.register(model)
    extent = Extent(4, 4, (5, 24), 4)
    return whole_model.judge(text, model, files, "cpu", 3, timed, 300.0, lambda row: None, extent)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_model_is_checked_in_all_phases_and_timed(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.py", tmp_path / "llama.mlp.py"
    wrong.write_text(SCALED.replace("FACTOR", "1.3"))
    found = judged("llama", {"llama.mlp": wrong}, True)
    assert [r.case["phase"] for r in found if r.kind == "logits"] == ["prefill", "decode", "mixed"]
    assert {r.status for r in found if r.kind == "logits"} == {Status.WRONG}
    assert all("expected token" in r.reason and ", got " in r.reason for r in found if r.kind == "logits")
    model_blocks.register("llama")
    right.write_text(stubs.source("llama.mlp"))
    found = judged("llama", {"llama.mlp": right}, True)
    logits, engine = found[:3], found[3:]
    assert {r.status for r in found} == {Status.OK}, [r.reason for r in found]
    assert all(r.metrics["c"] == 1 and r.case["calls"]["llama.mlp"] > 0 for r in logits)
    assert len(engine) == 2 and all(r.metrics["output_tokens_per_s"] > 0 for r in engine)
    assert all(r.provisional == whole_model.CPU_ONLY for r in engine)
