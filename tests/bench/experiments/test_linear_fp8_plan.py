"""Tests of linear_fp8.py's selection: the kernels that are compiled and checked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from experiments.linear import linear_fp8_plan as plan
from experiments.linear.linear_kernels import label

from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma


def told(tokens: str = "1,8,16,32,64", layers: str = "", sets: str = "") -> argparse.Namespace:
    return argparse.Namespace(tokens=tokens, layers=layers, sets=sets)


def test_default_selects_everything() -> None:
    assert plan.layers_of(told()) == plan.LAYERS and plan.sets_of(told()) == list(wgmma.PARAMS)
    assert plan.checked(told()) == list(plan.CHECKED)
    names = [label(p) for p in wgmma.PARAMS]
    assert len(set(names)) == len(names)  # a set is named by its values


def test_selection_limits_layers_and_sets() -> None:
    some = told("1,8,128", "o,half_down", "1/4/128/64")
    assert plan.layers_of(some) == {"o": (4096, 4096), "half_down": (4096, 7168)}
    assert plan.sets_of(some) == [{"splits": 1, "stages": 4, "rows": 128, "ahead": 64}]
    assert plan.checked(some) == [1, 3, 8] and plan.checked(told("32")) == [17, 32]
    with pytest.raises(SystemExit, match=r"q: not one of qkv, o"):
        plan.layers_of(told(layers="o,q"))


def test_every_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shares together compile each timed layer, each odd shape and the chains."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(plan, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(wgmma, "kernel_for", lambda device, *what: made.append(what))
    some = told("8", "o", "1/4/128,1/4/128/64")
    for part in range(3):
        plan.compile_share(some, part, 3)
    assert len(set(made)) == len(made)
    wanted = [((4096, 4096), 8, True), ((4096, 4096), 64, True), *((shape, 8, False) for shape in plan.ODD)]
    for (n, k), m, bf16 in wanted:
        for p in plan.sets_of(some):
            for blocks in (False, True):
                cut = wgmma.plan(m, n, k, **p, blocks=blocks)._replace(items=0, grid=0)
                assert (cut, bf16, blocks) in made
    assert {cut.tokens for cut, bf16, _ in made if not bf16} == {8}
