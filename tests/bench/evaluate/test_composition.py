"""The kernels tier: ops alone, then ops and blocks of a model with the set inside them."""

from __future__ import annotations

import pytest
from fk_bench.core.rows import Row, Status
from fk_bench.evaluate import suites
from fk_bench.evaluate.run import composition
from fk_bench.info.stubs import source
from fk_bench.kernels.judge.rows.judging import sides_of

from fastkernels.core import registry

SETTINGS = {"sources": ["random"], "rounds": 3, "seconds": 0.1, "most_cases": 1}


def test_blocks_of_a_model_run_the_set():
    text, blocks = composition._blocks("llama", {"rms_norm": "", "silu_and_mul": ""})
    assert text and len(blocks) == composition.MOST_BLOCKS
    for name in blocks:
        assert name.startswith("llama.") and registry.get(name).level in composition.LAYERS
        assert registry.reached(name, parts=True) & {"rms_norm", "silu_and_mul"}


def test_first_model_of_our_engine_is_chosen():
    assert composition.model_of(suites.load("default")) == "llama-3.1-8b"
    only = suites.of_model(suites.load("smoke"), "tiny-vit")
    assert composition.model_of(only) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_block_is_judged_with_the_set_inside(tmp_path):
    path = tmp_path / "silu_and_mul.py"
    path.write_text(source("silu_and_mul"))
    found: list[tuple[Row, str]] = []
    model = composition.model_of(suites.load("smoke"))
    composition.judged(
        {"silu_and_mul": str(path)}, SETTINGS, "cpu", True, lambda *row: found.append(row), model
    )
    composed = [row for row, how in found if how == "composed"]
    blocks = [row for row in composed if "." in str(row.subject.op)]
    assert found[0][1] == "independent" and blocks
    assert {row.status for row in blocks} == {Status.OK}, [row.reason for row in blocks]


@pytest.mark.slow
def test_ops_above_are_judged_on_cases_that_run_here(tmp_path):
    """Their first cases are for GPUs alone; a row without a time has a reason."""
    path = tmp_path / "rms_norm.py"
    path.write_text(source("rms_norm"))
    settings = {**SETTINGS, "most_cases": 2}
    options = composition._options(settings, "cpu", True)
    with sides_of(options) as sides:
        (row,) = composition._judge(
            ["mixtral_decoder_layer"], {"rms_norm": str(path)}, options, settings, sides
        )
    assert row.status is Status.OK, row.reason
