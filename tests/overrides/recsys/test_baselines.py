"""Baselines of recommenders on all values that the judge makes, and whether their calls can be captured in graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.correctness import cases, extremes
from fk_bench.kernels.judge.correctness.errors import compare, expect
from fk_bench.kernels.judge.memory.slots import Slots
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.recsys.production import BASELINES

OURS = ["cross_layer", "cross_low_rank", "embedding_bag", "graph_propagate", "top_k_scores"]
PAIRS = [
    (name, b) for name in OURS for b in BASELINES[name] if not b.modules and b.kind != "compiler"
]  # functions of PyTorch, also those for GPUs
IDS = [f"{name}-{b.name}" for name, b in PAIRS]


def cases_of(spec: OpSpec, baseline: Baseline) -> Iterator[Case]:
    for case in (c for c in spec.cases if "odd" in c.tags and spec.bytes_moved(c)):
        if baseline.name != "cusparse" or case.dtype == "float32":  # PyTorch multiplies no others on a CPU
            yield case
    for case in (c for c in spec.cases if "nodes" in c.dims and "model" in c.tags):
        small = {n: case.dims[n] // 1000 for n in ("nodes", "edges", "users")}
        yield replace(case, dims={**case.dims, **small})


def checked(
    spec: OpSpec, case: Case, baseline: Baseline, slots: Slots, nonfinite: bool = False
) -> list[str | None]:
    """Why the baseline cannot be called, for each slot; its results in the other slots are correct."""
    fn, found = baseline.make(), []
    for slot in range(slots.count):
        args = slots.args_of(slot)
        found.append(baseline.fails(*args))
        if found[-1] is None:
            made = fn(*args)
            got = list(made) if isinstance(made, tuple) else [made]
            assert not compare(spec, case, got, expect(spec, case, args, "op"), nonfinite=nonfinite).problem
    return found


@pytest.mark.parametrize(("name", "baseline"), PAIRS, ids=IDS)
def test_baseline_is_right_in_every_slot(name: str, baseline: Baseline) -> None:
    spec = registry.get(name)
    for case in cases_of(spec, baseline):
        make = cases.maker(spec, case)
        slots = Slots(spec, lambda g, make=make: make("cpu", g), "cpu", 3, "op", rolls=True)
        slots.refresh()
        slots.renew(2)
        assert checked(spec, case, baseline, slots) == [None] * 3


@pytest.mark.parametrize(("name", "baseline"), PAIRS, ids=IDS)
def test_baseline_is_right_or_declines_extreme_values(name: str, baseline: Baseline) -> None:
    spec, declined = registry.get(name), set()
    kinds = {k.name: k.nonfinite for k in extremes.kinds(spec)}
    for case in [c for c in cases_of(spec, baseline) if c.dtype == "float32"][:4]:
        for kind, change in cases._values(spec).items():
            make = cases.maker(spec, case)
            slots = Slots(spec, lambda g, make=make: make("cpu", g), "cpu", 2, "op")
            try:
                slots.edit(change)
            except IndexError:  # no value to change
                continue
            if any(checked(spec, case, baseline, slots, kinds.get(kind, False))):
                declined.add(kind)
    assert declined == ({"beyond"} if "beyond" in spec.extremes else set())


class Uncapturable(TorchDispatchMode):
    """Note the ops that wait for a GPU or copy from the CPU, which a capture of a CUDA graph refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh"):
            self.found.append(
                name
            )  # lift_fresh: of a tensor on the CPU with a Python number, as x[at] = 1 makes
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(t is not None and t.dtype == torch.bool for t in indices):
            self.found.append(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def uncapturable(fn: Any, *args: Any) -> list[str]:
    with Uncapturable() as mode:
        fn(*args)
    return mode.found


@pytest.mark.parametrize("name", OURS)
def test_baselines_need_no_copy_and_no_wait(name: str) -> None:
    spec = registry.get(name)
    functions = {b.name: b.make() for n, b in PAIRS if n == name and b.name != "cusparse"}
    functions |= {p.name: p.fn for p in spec.op.providers if p.name == "reference" or (
        p.name == "torch" and "cuda" in p.devices)}  # fmt: skip
    for case in (c for c in spec.cases if "odd" in c.tags):
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
        assert {n: uncapturable(fn, *args) for n, fn in functions.items()} == {n: [] for n in functions}, (
            case.name
        )


def test_copies_and_waits_are_noticed() -> None:
    x, at = torch.zeros(3, 4), torch.tensor([0, 2])

    def number(x: torch.Tensor, at: torch.Tensor) -> None:
        x[at] = 1.0

    assert uncapturable(number, x, at) == ["lift_fresh"]
    assert uncapturable(lambda x: x[x > 1], x) == ["index with a mask"]
    assert uncapturable(lambda x: x.sum().item(), x) == ["_local_scalar_dense"]


def test_baseline_in_a_module_declines_values() -> None:
    from fk_bench.kernels.judge.processes.implementation import Implementation

    spec = registry.get("graph_propagate")
    side = Implementation()
    try:
        side.load_implementation("graph_propagate", "cpu", {}, "production", "TorchGeometricLGConv", None)
        name = next(iter(side.baselines))
        case = next(c for c in spec.cases if c.name == "odd_63")
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(random.randrange(1 << 30)))
        assert name == "our module on graph_propagate=torch" and "unsupported" not in side.use(name, args)
        spec.extremes["beyond"](args)
        assert side.use(name, args) == {"unsupported": "an edge is from a node that does not exist"}
    finally:
        spec.op.set_candidate(None)
