"""Every operator and architecture of the inventory has a task, or a family that will bring it."""

from __future__ import annotations

from collections import Counter

import pytest
from fk_bench.info import model_blocks
from fk_bench.info.targets import COMING, GROUPS, targets

from fastkernels.core import registry

COUNTS = {"1": 48, "2": 40, "needed": 23, "model": 47}


def test_inventory_is_complete_and_unambiguous() -> None:
    found = targets()
    assert Counter(t.group for t in found) == COUNTS and set(COUNTS) == set(GROUPS)
    assert len({(t.group, t.name) for t in found}) == len(found)


def test_every_target_has_a_task_or_a_family() -> None:
    for target in targets():
        assert bool(target.tasks) != bool(target.family), target
        assert not target.family or target.family in COMING, target
    assert {t.family for t in targets()} - {""} == set(COMING)


@pytest.mark.slow
def test_every_task_of_a_target_exists() -> None:
    tasks = sorted({task for target in targets() for task in target.tasks})
    for model in {name.partition(".")[0] for name in tasks if "." in name}:
        model_blocks.register(model)
    unknown = [name for name in tasks if not registry.known(name)]
    assert not unknown
