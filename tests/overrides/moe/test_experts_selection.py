"""The selection model of experts: its terms and its proposals."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from fastkernels.core import registry
from fastkernels.core.tuning import Chip
from fastkernels.overrides.kit.selection import model
from fastkernels.overrides.moe import selection
from fastkernels.overrides.moe.moe_tiles import parsed
from fastkernels.overrides.moe.selection import Call

H200 = Chip("NVIDIA H200", 132, 4.917e12, 50 << 20)
AMPERE = Chip("NVIDIA A100", 108, 2e12, 40 << 20, (8, 0))
OLMOE, QWEN15, ODD = (64, 64, 8, 2048, 1024), (60, 60, 4, 2048, 1408), (40, 20, 5, 1000, 328)
TOKENS = 1, 2, 8, 32, 64, 256, 2048, 8192
BLOCKS, TENSOR = (128, 128), (0, 2)


def proposed(
    shape: tuple[int, ...], tokens: int, chip: Chip = H200, scales: tuple[int, int] | None = None
) -> Any:
    if scales is None:
        return selection.propose_experts((*shape, torch.bfloat16), (tokens,), chip)
    return selection.propose_experts_fp8((*shape, *scales, torch.bfloat16), (tokens,), chip)


@pytest.mark.parametrize("scales", [None, TENSOR, BLOCKS], ids=str)
def test_proposals_are_sets_that_the_op_takes(scales: Any) -> None:
    op = registry.get("fused_experts" if scales is None else "fused_experts_fp8").op
    known = {p.name: p for p in op.providers}
    for shape, tokens, chip in product((OLMOE, QWEN15, ODD), TOKENS, (H200, AMPERE)):
        found = proposed(shape, tokens, chip, scales)
        assert 1 <= len(found) <= 3 and len({str(each) for each in found}) == len(found)
        for name, params in found:
            assert not params or any(params.keys() == known_set.keys() for known_set in known[name].params)
            if name == "triton" and params:
                first, second = map(parsed, params.values())
                assert first.block_m == second.block_m
        if chip is AMPERE:
            assert all(name == "triton-few" or not params for name, params in found)


def test_few_tokens_try_the_kernels_without_sorting() -> None:
    assert [name for name, _ in proposed(OLMOE, 1)] == ["triton-few", "triton-few", "triton"]
    assert [name for name, _ in proposed(OLMOE, 8)] == ["triton-few", "triton", "triton"]
    assert {name for name, _ in proposed(OLMOE, 32)} == {"triton"}
    assert {name for name, _ in proposed((8, 8, 2, 4096, 14336), 8)} == {"triton"}  # pairs share experts
    assert proposed(OLMOE, 2048, H200, BLOCKS)[0] == ("cuda-tiled-fp8", {})


def test_more_rows_take_larger_tiles() -> None:
    def rows(tokens: int) -> int:
        return parsed(next(p for name, p in proposed(OLMOE, tokens) if name == "triton")["gate_up"]).block_m

    found = [rows(tokens) for tokens in TOKENS]
    assert found == sorted(found) and found[0] == 16 and found[-1] == 128


def test_calls_without_a_proposal() -> None:
    assert selection.propose_experts((*OLMOE, torch.float32), (8,), H200) == ()
    assert proposed((64, 64, 8, 2048, 0), 8) == () and proposed(OLMOE, 0) == ()


@pytest.mark.parametrize(("shape", "tokens", "block_m"), [(OLMOE, 3, 16), (OLMOE, 300, 64), (ODD, 70, 32)])
def test_expected_blocks_are_the_mean_of_random_routing(shape: Any, tokens: int, block_m: int) -> None:
    call, generator = Call(*shape, tokens), torch.Generator().manual_seed(0)
    experts, here, topk = shape[:3]
    hit, blocks, rounds = 0.0, 0.0, 60
    for _ in range(rounds):
        ids = torch.rand(tokens, experts, generator=generator).topk(topk).indices
        rows = torch.bincount(ids.flatten(), minlength=experts)[:here]
        hit += float((rows > 0).sum()) / rounds
        blocks += float(-(-rows // block_m).sum()) / rounds
    assert selection.expected(call, block_m) == pytest.approx((hit, blocks), rel=0.05)


def test_one_token_reads_the_rows_of_its_experts() -> None:
    hit, blocks = selection.expected(Call(*OLMOE, 1), 16)
    assert hit == pytest.approx(8) and blocks == 8  # one block a pair: nothing is sorted


@pytest.mark.parametrize("op", ["fused_experts", "fused_experts_fp8"])
def test_shipped_model_has_all_kinds_and_little_regret(op: str) -> None:
    found = model(op)
    assert set(found.weights) == {"triton few", "triton many"}
    call = Call(*OLMOE, 32, 2 if op == "fused_experts" else 1)
    terms = {c.kind: len(c.terms) for c in selection.candidates(call, H200)}
    assert all(len(found.weights[kind]) == count for kind, count in terms.items())
    assert min(weight for weights in found.weights.values() for weight in weights) >= 0
