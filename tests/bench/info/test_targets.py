"""Every operator and architecture of the inventory has a task, or a reason why nothing judges it."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from fk_bench.evaluate.adapters import published
from fk_bench.info import model_blocks
from fk_bench.info.targets import FILES, GROUPS, MODEL, Target, renewed, targets, tasks_of

from fastkernels.core import registry
from fastkernels.models.common.descriptions.registry import models

COUNTS = {"1": 48, "2": 40, "needed": 23, "model": 47}
FAST = ("mamba", "flux", "gaussian_splatting")  # a model of tokens, one of a pipeline, one without blocks


def test_inventory_is_complete_and_unambiguous() -> None:
    found = targets()
    assert Counter(t.group for t in found) == COUNTS and set(COUNTS) == set(GROUPS)
    assert len({(t.group, t.name) for t in found}) == len(found)


def test_every_target_has_tasks_or_a_reason() -> None:
    for target in targets():
        assert bool(target.tasks) != bool(target.reason), target


def test_target_with_the_name_of_an_op_has_a_task() -> None:
    assert not [t for t in targets() if not t.tasks and registry.known(t.name)]


def test_every_architecture_has_a_model_file_and_tasks() -> None:
    of_models = [t for t in targets() if t.group == MODEL]
    assert all(t.tasks and FILES.get(t.name, t.name) in models() for t in of_models)


def test_targets_agree_with_the_published_files() -> None:
    """An op that a published file is adapted to judges its target."""
    tasks = {(t.group, t.name): t.tasks for t in targets()}
    with Path(published.__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file, delimiter="\t") if r["op"] and r["level"] in ("1", "2")]
    known = [r for r in rows if (r["level"], r["target"]) in tasks]
    assert len(known) > 20
    assert not [r["target"] for r in known if r["op"] not in tasks[r["level"], r["target"]]]


@pytest.mark.parametrize("name", FAST)
def test_architecture_has_the_tasks_of_the_registry(name: str) -> None:
    (target,) = [t for t in targets() if (t.group, t.name) == (MODEL, name)]
    assert target.tasks == tasks_of(name), "run tools/targets.py"


def test_renewal_replaces_the_tasks_of_architectures_alone() -> None:
    op, stale = Target("1", "silu", (), "none"), Target(MODEL, "gaussian_splatting", (), "later")
    first, second = renewed([op, stale])
    assert first == op and "rasterize_gaussians" in second.tasks and not second.reason


@pytest.mark.slow
def test_targets_are_those_of_the_registry() -> None:
    assert renewed(targets()) == targets(), "run tools/targets.py"


@pytest.mark.slow
def test_every_task_of_a_target_exists() -> None:
    tasks = sorted({task for target in targets() for task in target.tasks})
    for model in {name.partition(".")[0] for name in tasks if "." in name}:
        model_blocks.register(model)
    unknown = [name for name in tasks if not registry.known(name)]
    assert not unknown
