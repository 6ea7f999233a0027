"""Engines that share a GPU: the memory of each, and their groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from fk_bench.e2e.command import sizes_of
from fk_bench.e2e.patch_compare import DENSE, WITH_ENGINE
from fk_bench.e2e.sharing import GIB, Need, kv_tokens, need, waves

H200 = 139 * GIB


def engine(gib: int) -> Need:
    return Need(f"m{gib}", gib * GIB, 0, 0, 0)


def test_engines_are_grouped_by_memory_largest_first() -> None:
    found = waves([engine(g) for g in (10, 60, 30, 40)], 100 * GIB, at_once=3)
    assert [[n.weights // GIB for n in group] for group in found] == [[60, 40], [30, 10]]
    assert len(waves([engine(g) for g in (1, 2, 3)], 100 * GIB, at_once=2)) == 2
    assert len(waves([engine(g) for g in (30, 31)], 100 * GIB, at_once=2, copies=2)) == 2


def test_model_larger_than_the_memory_is_alone() -> None:
    assert [len(group) for group in waves([engine(200), engine(1)], 100 * GIB, at_once=4)] == [1, 1]


def test_kv_cache_holds_the_largest_load_and_one_long_request() -> None:
    assert kv_tokens([(64, 576), (4, 1928)], longest=1944) >= 64 * 576
    assert kv_tokens([(1, 8)], longest=1944) >= 1944 and kv_tokens([], longest=100) % 16 == 0


@pytest.mark.parametrize("models", [DENSE, WITH_ENGINE])
def test_default_models_have_sizes_and_fit_on_one_gpu(models: tuple[str, ...], tmp_path: Path) -> None:
    copies = 1 if models is DENSE else 2
    needs = [need(m, sizes_of(m, tmp_path), "bfloat16", 40000, gpu=True) for m in models]
    assert all(copies * n.total < H200 for n in needs)
    assert {n.model: round(n.weights / 2e9, 1) for n in needs}.items() >= {
        "qwen2.5-7b": 7.6, "olmo-2-1124-7b": 7.3, "gemma-2-9b": 9.2, "phi-4": 14.7,
    }.items()  # fmt: skip
    groups = waves(needs, H200, at_once=4, copies=copies)
    assert sorted(n.model for group in groups for n in group) == sorted(models)
    assert len(groups) < len(models)
