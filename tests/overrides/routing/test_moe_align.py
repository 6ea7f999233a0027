"""Tests of moe_align: exact ids and order, both kernels, host functions, errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support.kernels import warm

from fastkernels.overrides.routing import moe_align, moe_align_triton, sglang, vllm

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "moe_align_cases.py"


def test_both_kernels_equal_reference() -> None:
    """Every entry, bit for bit. The script runs in its own process because Triton interprets kernels from import on."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run([SCRIPT], env)
    assert done.returncode == 0, done.stderr
    found = {r["case"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}
    assert {case: problem for case, problem in found.items() if problem} == {}
    assert {case.split()[0] for case in found} == {"by_experts", "by_chunks"} and len(found) > 40


@pytest.mark.parametrize(
    ("pairs", "experts", "chunks"),
    [
        (2, 8, False), (256, 8, False), (1408, 8, False), (64, 128, False), (256, 128, False), (252, 60, False),
        (1024, 128, True), (2048, 128, True), (32768, 128, True), (4400, 33, True), (8192, 8, True),
    ],
)  # fmt: skip
def test_many_pairs_use_two_launches(pairs: int, experts: int, chunks: bool) -> None:
    """Measured cases: where two launches are used, one launch had 0.41 to 1.12 times vLLM's speed."""
    assert moe_align_triton.in_chunks(pairs, experts) is chunks


@pytest.mark.parametrize(
    ("pairs", "buckets"), [(0, 32), (1, 32), (8192, 32), (8193, 32), (32768, 128), (1 << 20, 2048)]
)
def test_chunk_counts_take_at_most_128_kib(pairs: int, buckets: int) -> None:
    """Every program reads the counts of all chunks."""
    chunk = moe_align_triton.chunk_size(pairs, buckets)
    assert chunk >= 64 and chunk & (chunk - 1) == 0
    assert -(-pairs // chunk) * buckets * 4 <= 128 * 1024


def test_vllm_documentation_example() -> None:
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    found = vllm.vllm_moe_align_block_size(ids, 4, 5, return_scatter_idx=True)
    wanted = [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert found[0].tolist() == wanted + [12] * (12 + 5 * 3 - 16)
    assert found[1].tolist() == [1, 2, 3, 4, 0, 0, 0] and found[2].tolist() == [16]
    assert found[3].flatten().tolist() == list(range(12))


def test_experts_on_other_ranks() -> None:
    """vLLM's expert_map and SGLang's id -1: pairs are dropped or sorted into blocks of expert -1."""
    ids, here = torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    kept = vllm.vllm_moe_align_block_size_0_26(ids, 2, 4, here)
    assert kept[0][: kept[2]].tolist() == [0, 5, 1, 3, 2, 6, 4, 6]
    assert kept[1][: kept[2] // 2].tolist() == [-1, 0, -1, 1]
    out = vllm.vllm_moe_align_block_size(ids, 2, 4, here, True, True, True)
    assert out[0][: out[2]].tolist() == [1, 3, 4, 6] and out[1][:2].tolist() == [0, 1]
    assert out[3].flatten().tolist() == [-1, 1, -1, 3, 4, -1] and len(out[0]) % 2 == 0
    local = torch.tensor([[-1, 0], [-1, 0], [1, -1]])
    for function in (sglang.sglang_moe_align_block_size_0_5_17, sglang.sglang_moe_align_block_size):
        first = function(local, 2, 2)
        assert first[0][: first[2]].tolist() == [0, 2, 5, 6, 1, 3, 4, 6]
        assert first[1][: first[2] // 2].tolist() == [-1, -1, 0, 1]
        less = function(local, 2, 2, True)
        assert less[0][: less[2]].tolist() == [1, 3, 4, 6] and less[1][:2].tolist() == [0, 1]
    with pytest.raises(ValueError, match="needs ignore_invalid_experts"):
        vllm.vllm_moe_align_block_size(ids, 2, 4, here, return_scatter_idx=True)
    with pytest.raises(ValueError, match="pad_expert_ids=True is not supported"):
        sglang.sglang_moe_align_block_size(ids, 2, 4, pad_expert_ids=True)


@pytest.mark.parametrize("routing", ["even", "all to one", "empty experts"])
def test_capacity_holds_worst_case(routing: str) -> None:
    for pairs, block, e in ((1, 16, 8), (7, 16, 8), (8, 16, 8), (64, 16, 8), (65, 128, 3)):
        ids = torch.arange(pairs) % e if routing == "even" else torch.full((pairs,), e - 1)
        if routing == "empty experts":
            ids[: pairs // 2] = 0
        size = moe_align.padded_size(pairs, block, e)
        sorted_ids, _, used = moe_align.moe_align(ids[:, None], block, e, size, None, False)
        assert used.item() <= size
        assert sorted_ids[sorted_ids < pairs].sort().values.tolist() == list(range(pairs))
