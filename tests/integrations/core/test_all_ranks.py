"""Ranks that have not loaded a patch are named, over a store as of processes on several nodes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from fk_integrations.core import all_ranks

from fastkernels.patch import PatchError


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, int]]:
    """The groups of three ranks with one store; `all_ranks` sees the first of the list."""
    store = dist.HashStore()
    found: list[tuple[object, int, int]] = [(store, rank, 3) for rank in range(3)]
    monkeypatch.setattr(all_ranks, "_group", lambda: found[0])
    return found


def test_absent_ranks_are_named(ranks: list[tuple[object, int, int]]) -> None:
    all_ranks.announce("vllm")
    with pytest.raises(
        PatchError, match=r"^ranks \[1, 2\] have not loaded the patch: set FASTKERNELS=1 on every"
    ):
        all_ranks.check("vllm", 0.1)
    ranks.append(ranks.pop(0))
    all_ranks.announce("vllm")
    with pytest.raises(PatchError, match=r"^rank 2 has not loaded the patch"):
        all_ranks.check("vllm", 0.1)


def test_announced_ranks_pass(ranks: list[tuple[object, int, int]]) -> None:
    for _ in range(3):
        all_ranks.announce("sglang")
        ranks.append(ranks.pop(0))
    all_ranks.check("sglang", 0.1)


def test_one_process_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    all_ranks.announce("vllm")
    all_ranks.check("vllm", 0.1)
