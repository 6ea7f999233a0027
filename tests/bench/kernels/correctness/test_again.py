"""A wrong case can be run again with the same values, which the verdict reveals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.core.rows import Row, Status
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.correctness.again import revealed, trial_of
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import Slots

from fastkernels.core import registry

CUT = """
import torch.nn.functional as F
def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=1.0)) * up
"""


def judged(folder: Path, **options: Any) -> Row:
    file = folder / "silu_and_mul.py"
    file.write_text(CUT)
    rows = judge_ops(["silu_and_mul"], {"silu_and_mul": file}, Options(timed=False, **options))
    return next(r for r in rows if r.kind == "case")


def test_wrong_case_is_reproduced_by_its_command(tmp_path: Path) -> None:
    first = judged(tmp_path, cases=("random",), names=("odd_1128",))
    assert first.status is Status.WRONG and "d=1128" in first.reason and "; at [" in first.reason
    values = first.case["values"]
    assert first.reason.endswith(f"--candidate {tmp_path / 'silu_and_mul.py'} --values {values}")
    again = judged(tmp_path, values=values)
    assert again.status is Status.WRONG and again.case["source"] == "values"
    assert again.reason.partition("\n")[0] == first.reason.partition("\n")[0]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(layout.tensors(a), layout.tensors(b), strict=True))


@pytest.mark.parametrize(
    ("op", "source"), [("silu_and_mul", "held-out"), ("topk_softmax", "random"), ("moe_align", "captured")]
)
def test_values_of_every_slot_are_made_again(op: str, source: str) -> None:
    """Scaled, rolled and permuted ones, of drawn sizes and of captured calls."""
    spec = registry.get(op)
    trial = next(t for t in trials(spec, (source,), "cpu") if t.gpu_only(spec) is None)
    slots = Slots(spec, lambda g: trial.make("cpu", g), "cpu", 6, "op", trial.rolls)
    slots.refresh()
    slots.refresh()
    for slot in range(6):
        again = trial_of(spec, revealed(spec, trial, slots.recipe_of(slot)), None)
        made = Slots(
            spec, lambda g, again=again: again.make("cpu", g), "cpu", 2, "op", again.rolls, recipe=again.recipe
        )  # fmt: skip
        made.fill([0, 0])
        assert equal(made.args_of(1), slots.args_of(slot)) and again.case.dims == trial.case.dims


def test_weights_of_a_module_are_made_again() -> None:
    spec = registry.get("rms_norm")
    trial = next(t for t in trials(spec, ("random",), "cpu", ("odd_1128",)))
    slots = Slots(spec, lambda g: trial.make("cpu", g), "cpu", 4, "module", True, cls="VllmRMSNorm")
    slots.refresh()
    recipe = slots.recipe_of(3)
    made = Slots(
        spec, lambda g: trial.make("cpu", g), "cpu", 2, "module", True, cls="VllmRMSNorm", recipe=recipe
    )  # fmt: skip
    made.fill([0, 0])
    assert equal(made.args_of(0), slots.args_of(3))


def test_no_recipe_reveals_nothing() -> None:
    spec = registry.get("silu_and_mul")
    trial = next(t for t in trials(spec, ("random",), "cpu", ("odd_1128",)))
    assert revealed(spec, trial, None) == ""


@pytest.mark.parametrize("text", ["", "abc", "eNp1j0tuwzAMRK8SaJ2kJinKSS8TqLIcG5UsQx8URZC7V"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not what a wrong case gave; copy all of it"):
        trial_of(registry.get("silu_and_mul"), text, None)


def test_values_of_another_op_are_refused() -> None:
    spec = registry.get("silu_and_mul")
    trial = next(t for t in trials(spec, ("random",), "cpu", ("odd_1128",)))
    slots = Slots(spec, lambda g: trial.make("cpu", g), "cpu", 1, "op", True)
    slots.fill([0])
    with pytest.raises(ValueError, match="is of the op silu_and_mul, not of gelu"):
        trial_of(registry.get("gelu"), revealed(spec, trial, slots.recipe_of(0)), None)
