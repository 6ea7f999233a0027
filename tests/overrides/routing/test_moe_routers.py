"""Tests of topk_softmax, grouped_topk, the hosts' routers and moe_sum."""

from __future__ import annotations

import math

import pytest
import torch
from support.modules import close, randn

from fastkernels.overrides.routing import grouped_topk, sglang, topk_softmax, vllm

INF, NAN = math.inf, math.nan


def test_topk_softmax_equals_torch() -> None:
    logits = randn(33, 60)
    weights, ids, pairs = topk_softmax.topk_softmax(logits, 6, False)
    want = logits.softmax(-1).topk(6)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(weights, want.values)
    assert torch.equal(ids.long(), want.indices)
    assert torch.equal(pairs, torch.arange(6)[None] * 33 + torch.arange(33)[:, None])
    normal, again, _ = topk_softmax.topk_softmax(logits, 6, True)
    torch.testing.assert_close(normal, want.values / want.values.sum(-1, keepdim=True))
    assert torch.equal(ids, again)


@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_softmax_handles_ties_infinities_and_nan(renormalize: bool) -> None:
    """The lowest id wins; ids are distinct and valid for any logits."""
    rows = [[1.0, 3, 3, 1, 3], [0.0, -0.0, 0, 0, 0], [-INF, -INF, 5, -INF, -INF], [NAN, 2, 1, 3, -INF]]
    rows += [[-3e38, 3e38, 0, 1, 2], [NAN] * 5]
    weights, ids, _ = topk_softmax.topk_softmax(torch.tensor(rows), 3, renormalize)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [2, 0, 1], [3, 1, 2], [1, 4, 3], [0, 1, 2]]
    assert weights[:3].isfinite().all() and weights[3].isnan().all() and weights[5].isnan().all()
    assert weights[2].tolist() == weights[4].tolist() == [1, 0, 0]


def test_topk_softmax_rejects_invalid_arguments() -> None:
    with pytest.raises(ValueError, match=r"topk 9 is not in 1 \.\. 8"):
        topk_softmax.topk_softmax(randn(2, 8), 9)
    with pytest.raises(ValueError, match="hidden_states has 3 tokens, gating_output 2"):
        vllm.vllm_fused_topk(randn(3, 4), randn(2, 8), 2, True)
    for call in (vllm.vllm_fused_topk, sglang.sglang_fused_topk):
        with pytest.raises(ValueError, match="scoring_func='sigmoid' is not supported"):
            call(randn(2, 4), randn(2, 8), 2, True, scoring_func="sigmoid")


def test_vllm_ids_have_requested_dtype() -> None:
    _, ids, _ = vllm.vllm_fused_topk(randn(2, 4), randn(2, 8), 2, True, torch.int64)
    assert ids.dtype == torch.int64


def naive_grouped_ids(
    logits: torch.Tensor, k: int, groups: int, best: int, scoring: str, bias: torch.Tensor | None
) -> list[list[int]]:
    """Return the ids by sorting (score, id) in Python."""
    found = []
    for row in logits.double():
        scores = row.softmax(-1) if scoring == "softmax" else row.sigmoid()
        choice = (scores if bias is None else scores + bias.double()).tolist()
        size = len(choice) // groups
        parts = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        totals = [part[0] if bias is None else part[0] + part[1] for part in parts]
        kept = sorted(range(groups), key=lambda g: (-totals[g], g))[:best]
        inside = [e for e in range(len(choice)) if e // size in kept]
        found.append(sorted(inside, key=lambda e: (-choice[e], e))[:k])
    return found


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_grouped_topk_equals_naive_sort(biased: bool, scoring: str) -> None:
    logits, bias = randn(40, 24), randn(24, seed=1) / 10 if biased else None
    args = (logits, 5, False, 4, 2, scoring, bias)
    weights, ids = grouped_topk.grouped_topk(*args)
    assert ids.tolist() == naive_grouped_ids(logits, 5, 4, 2, scoring, bias) and ids.dtype == torch.int32
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, ids.long()))
    normal, again = grouped_topk.grouped_topk(*args[:2], True, *args[3:], 2.5)
    torch.testing.assert_close(normal, 2.5 * weights / weights.sum(-1, keepdim=True))
    assert torch.equal(ids, again)


def test_grouped_topk_handles_ties_masks_and_zeros() -> None:
    """The lowest id and group win, masked experts come last but are distinct, and weights of 0 stay 0."""
    rows = torch.tensor([[1.0] * 8, [-INF] * 6 + [3.0, -INF], [NAN, 0, 0, 0, 5, NAN, 1, -INF], [0.0] * 8])
    _, ids = grouped_topk.grouped_topk(rows, 3, True, 4, 2, "sigmoid")
    assert ids.tolist() == [[0, 1, 2], [6, 0, 1], [4, 6, 5], [0, 1, 2]]
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 0.5, 0.5])
    _, ids = grouped_topk.grouped_topk(rows[:1], 3, True, 4, 2, "sigmoid", bias)
    assert ids.tolist() == [[6, 7, 0]]
    weights, _ = grouped_topk.grouped_topk(torch.full((1, 8), -200.0), 2, True, 4, 2, "sigmoid")
    assert weights.tolist() == [[0, 0]]


def test_one_group_equals_topk_softmax() -> None:
    logits = randn(9, 40)
    found = grouped_topk.grouped_topk(logits, 6, True)
    for a, b in zip(found, topk_softmax.topk_softmax(logits, 6, True), strict=False):
        torch.testing.assert_close(a, b)


def test_host_routers_equal_grouped_topk() -> None:
    x, logits, bias = randn(7, 4), randn(7, 16), randn(16, seed=1) / 10
    module = vllm.VllmGroupedTopk(3, True, 4, 2, "sigmoid", 2.5)
    want = grouped_topk.grouped_topk(logits, 3, True, 4, 2, "sigmoid", bias, 2.5)
    fused = vllm.vllm_fused_grouped_topk(x, logits, 3, True, bias, 4, 2, "sigmoid", 2.5)
    biased = sglang.sglang_biased_grouped_topk_gpu
    for found in (module(x, logits, bias), fused, biased(x, logits, bias, 3, True, 4, 2, 0, 2.5, True)):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    torch.testing.assert_close(biased(x, logits, bias, 3, True, 4, 2, 0, 2.5)[0] * 2.5, want[0])
    for call, message in (
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 5, 2), "16 experts cannot form 5 equal groups"),
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 4, 5), r"topk_group 5 is not in 1 \.\. 4"),
        (lambda: grouped_topk.grouped_topk(logits, 9, True, 4, 2), r"topk 9 is not in 1 \.\. 8"),
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 4, 2, "tanh"), "scoring_func 'tanh' is neither"),
        (
            lambda: grouped_topk.grouped_topk(logits, 3, True, 16, 4, "sigmoid", bias),
            "two or more experts per group",
        ),
        (lambda: module(x[:3], logits), "hidden_states has 3 tokens, gating_output 7"),
        (lambda: biased(x, logits, bias, 3, True, 4, 2, 1), "num_fused_shared_experts=1 is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_moe_sum_skips_absent_experts() -> None:
    parts, weights = randn(3, 4, 10), randn(3, 4, seed=1)
    ids, here = torch.tensor([[0, 1, 2, 3], [3, -1, 1, 0], [-1, 1, 3, -1]]), torch.tensor([0, -1, 1, -1])
    out = torch.full((3, 10), NAN)
    sglang.sglang_moe_sum_reduce_triton(parts, out, 2.5)
    close(out, 2.5 * parts.sum(1))
    vllm.vllm_moe_sum(parts, out)
    close(out, parts.sum(1))
    close(vllm.vllm_moe_fused_mul_sum(parts, weights), (parts * weights[..., None]).sum(1))
    parts[(ids < 0) | (here[ids.clamp(min=0)] < 0)] = NAN
    vllm.vllm_moe_sum(parts, out, ids, here)
    close(out, torch.stack((parts[0, 0] + parts[0, 2], parts[1, 3], torch.zeros(10))))
    found = vllm.vllm_moe_fused_mul_sum(parts, weights, out, ids, here)
    assert found is out
    close(out[1], parts[1, 3] * weights[1, 3])
    for call, message in (
        (lambda: vllm.vllm_moe_sum(parts, out[:2]), r"got \(3, 4, 10\) and \(2, 10\)"),
        (lambda: vllm.vllm_moe_sum(parts, out, ids[:2]), r"topk_ids \(2, 4\) must be \(3, 4\)"),
        (lambda: vllm.vllm_moe_sum(parts, out, None, here), "expert_map needs topk_ids"),
        (
            lambda: vllm.vllm_moe_fused_mul_sum(parts, weights, num_valid_tokens=here),
            "num_valid_tokens is not",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
