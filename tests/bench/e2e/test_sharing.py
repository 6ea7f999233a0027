"""Engines that share a GPU: the memory of each, and their groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fk_bench.e2e import sharing
from fk_bench.e2e.command import sizes_of
from fk_bench.e2e.patch_compare import DENSE, WITH_ENGINE
from fk_bench.e2e.sharing import GIB, Need, kv_tokens, need, room, waves

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


@pytest.mark.parametrize(
    ("model", "ranks", "share"),
    [("qwen2.5-7b", 2, 1 / 2), ("qwen2.5-7b", 28, 1 / 4), ("deepseek-v2-lite", 2, 1.0), ("mamba2-2.7b", 2, 1 / 2)],
)  # fmt: skip
def test_ranks_share_weights_and_heads_but_no_latents(
    model: str, ranks: int, share: float, tmp_path: Path
) -> None:
    """28 ranks have copies of 4 heads of keys and values."""
    path = sizes_of(model, tmp_path)
    whole, part = (need(model, path, "bfloat16", 40000, gpu=True, ranks=n) for n in (1, ranks))
    assert part.tokens == whole.tokens and part.kv == pytest.approx(share * whole.kv, rel=1e-3)
    assert whole.weights / ranks < part.weights < 1.02 * whole.weights / ranks


def test_memory_is_of_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.extend(command)
        return SimpleNamespace(stdout="81559\n" if "-i" in command else "81559\n5\n")

    monkeypatch.setattr(sharing.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sharing._of_gpu("free") == 5 << 20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert sharing._of_gpu("free") == 81559 << 20 and asked[-2:] == ["-i", "3"]


def gpu_of_80_gib(monkeypatch: pytest.MonkeyPatch, *free: float) -> list[float]:
    """A GPU whose free GiB are one after another; returns the seconds that are slept, which pass at once."""
    values, slept = iter(free), list[float]()
    monkeypatch.setattr(sharing, "_of_gpu", lambda kind: int((80 if kind == "total" else next(values)) * GIB))
    monkeypatch.setattr(sharing.time, "sleep", slept.append)
    monkeypatch.setattr(sharing.time, "monotonic", lambda: sum(slept))
    return slept


def test_engines_wait_for_memory_that_an_ended_process_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = gpu_of_80_gib(monkeypatch, 0.3, 0.3, 30, 79)
    assert room([engine(30), engine(300)], 2, True) == 79 * GIB and len(slept) == 3
    said = "waited 3 s for the GPU's memory: 0.3 GiB were free, 79.0 GiB are now, and 60.0 GiB are needed"
    assert capsys.readouterr().err.strip() == said
    slept = gpu_of_80_gib(monkeypatch, 70)
    assert room([engine(10) + engine(20)], 2, True) == 70 * GIB and not slept and not capsys.readouterr().err


def test_wait_for_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = gpu_of_80_gib(monkeypatch, *[8] * 100)
    assert room([engine(30)], 2, True, seconds=20) == 8 * GIB and sum(slept) == 20
    assert "60.0 GiB are needed: another process may hold it" in capsys.readouterr().err
