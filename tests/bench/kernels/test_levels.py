"""Blocks of a model in the judge: a candidate of one level is live inside every level above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Row, Status
from fk_bench.info import model_blocks, stubs
from fk_bench.kernels.judge import Options, judge_ops

CHAIN = ("rms_norm", "llama.mlp", "llama.decoder_layer", "llama.model")
WRONG = """
from fastkernels.overrides.block import vllm


class VllmLlamaMLP(vllm.VllmLlamaMLP):
    def forward(self, x):
        return super().forward(x) * 1.01
"""


def judged(ops: list[str], files: dict[str, Path], *cases: str, **more: Any) -> dict[str, Row]:
    text, _ = model_blocks.register("llama")
    options = Options(cases=("random",), names=cases, timed=False, hard=0, model=text, **more)
    return {str(r.subject.op): r for r in judge_ops(ops, files, options) if r.kind == "case"}


def test_wrong_block_candidate_is_caught(tmp_path: Path) -> None:
    file = tmp_path / "llama.mlp.py"
    file.write_text(WRONG)
    row = judged(["llama.mlp"], {"llama.mlp": file}, "small_7")["llama.mlp"]
    assert row.status is Status.WRONG and row.case["level"] == 2


@pytest.mark.slow
def test_row_names_the_hosts_module_or_why_there_is_none() -> None:
    rows = judged(["llama.mlp", "llama.model"], {}, "small_7", "small_decode", against="host")
    assert {r.status for r in rows.values()} == {Status.OK}, [r.reason for r in rows.values()]
    assert rows["llama.mlp"].baseline == "transformers LlamaMLP"
    assert str(rows["llama.model"].baseline).startswith("our module on ")
    assert rows["llama.model"].case["passed_over"] == {
        "transformers": "a whole model is measured in an engine"
    }


@pytest.mark.slow
def test_candidates_are_live_in_every_level_above(tmp_path: Path) -> None:
    model_blocks.register("llama")
    files = {name: tmp_path / f"{name}.py" for name in CHAIN}
    for name, file in files.items():
        file.write_text(stubs.source(name))
    rows = judged(["llama.decoder_layer", "llama.model"], files, "small_mixed")
    assert {r.status for r in rows.values()} == {Status.OK}, [r.reason for r in rows.values()]
    layer, model = (rows[name].case["candidates"] for name in CHAIN[2:])
    assert layer["rms_norm"] >= 2 and layer["llama.mlp"] == 1 and layer["llama.decoder_layer"] == 1
    assert model["llama.decoder_layer"] == 2 and model["llama.mlp"] == 2 and model["llama.model"] == 1
    assert model["rms_norm"] == 5  # two layers and the last norm


@pytest.mark.slow
def test_wrong_part_makes_the_levels_above_wrong(tmp_path: Path) -> None:
    file = tmp_path / "llama.mlp.py"
    file.write_text(WRONG)
    rows = judged(["llama.decoder_layer", "llama.model"], {"llama.mlp": file}, "small_mixed")
    assert {r.status for r in rows.values()} == {Status.WRONG}
