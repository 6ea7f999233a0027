"""The MoE ops beyond their cases but for moe_align: exact ids and weights, the hosts' functions, what they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fk_bench import routing_time

from fastkernels import registry
from fastkernels.overrides.l1 import grouped_topk, moe_sum, topk_softmax
from fastkernels.overrides.l1.silu_and_mul import silu_and_mul
from fastkernels.overrides.l2 import _moe_tiles, fused_experts, sparse_moe
from fastkernels.overrides.l3 import _layer_calls, mixtral_decoder_layer
from fastkernels.spec import Case

INF, NAN = math.inf, math.nan


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def experts(tokens: int = 9, e: int = 4, k: int = 2, h: int = 24, i: int = 14) -> list[torch.Tensor]:
    """hidden_states, w1, w2, topk_weights, topk_ids."""
    weights, ids = randn(tokens, e, seed=1).softmax(-1).topk(k)
    return [randn(tokens, h), randn(e, 2 * i, h, seed=2), randn(e, h, i, seed=3), weights, ids.int()]


def by_hand(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    rows = []
    for t in range(len(x)):
        row = torch.zeros(x.shape[1])
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            if 0 <= e < len(w1):
                gate, up = (w1[e] @ x[t]).chunk(2)
                row += weight * (w2[e] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-5)


def test_topk_is_torch() -> None:
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
def test_ties_infinities_and_nan(renormalize: bool) -> None:
    """The lowest id wins; ids are always distinct and of experts, whatever the logits are."""
    rows = [[1.0, 3, 3, 1, 3], [0.0, -0.0, 0, 0, 0], [-INF, -INF, 5, -INF, -INF], [NAN, 2, 1, 3, -INF]]
    rows += [[-3e38, 3e38, 0, 1, 2], [NAN] * 5]
    weights, ids, _ = topk_softmax.topk_softmax(torch.tensor(rows), 3, renormalize)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [2, 0, 1], [3, 1, 2], [1, 4, 3], [0, 1, 2]]
    assert weights[:3].isfinite().all() and weights[3].isnan().all() and weights[5].isnan().all()
    assert weights[2].tolist() == weights[4].tolist() == [1, 0, 0]


def test_topk_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"topk 9 is not in 1 \.\. 8"):
        topk_softmax.topk_softmax(randn(2, 8), 9)
    with pytest.raises(ValueError, match="hidden_states has 3 tokens, gating_output 2"):
        topk_softmax.vllm_fused_topk(randn(3, 4), randn(2, 8), 2, True)
    for call in (topk_softmax.vllm_fused_topk, topk_softmax.sglang_fused_topk):
        with pytest.raises(ValueError, match="scoring_func='sigmoid' is not supported"):
            call(randn(2, 4), randn(2, 8), 2, True, scoring_func="sigmoid")


def test_vllm_ids_in_the_type_that_is_asked_for() -> None:
    _, ids, _ = topk_softmax.vllm_fused_topk(randn(2, 4), randn(2, 8), 2, True, torch.int64)
    assert ids.dtype == torch.int64


def groups_by_hand(
    logits: torch.Tensor, k: int, groups: int, best: int, scoring: str, bias: torch.Tensor | None
) -> list[list[int]]:
    """The ids, in Python's own sorting of (score, id)."""
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
def test_experts_of_the_best_groups(biased: bool, scoring: str) -> None:
    logits, bias = randn(40, 24), randn(24, seed=1) / 10 if biased else None
    args = (logits, 5, False, 4, 2, scoring, bias)
    weights, ids = grouped_topk.grouped_topk(*args)
    assert ids.tolist() == groups_by_hand(logits, 5, 4, 2, scoring, bias) and ids.dtype == torch.int32
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, ids.long()))
    normal, again = grouped_topk.grouped_topk(*args[:2], True, *args[3:], 2.5)
    torch.testing.assert_close(normal, 2.5 * weights / weights.sum(-1, keepdim=True))
    assert torch.equal(ids, again)


def test_groups_of_equals_and_of_nothing() -> None:
    """The lowest id and group win; masked experts come last but are distinct; weights of 0 stay 0."""
    rows = torch.tensor([[1.0] * 8, [-INF] * 6 + [3.0, -INF], [NAN, 0, 0, 0, 5, NAN, 1, -INF], [0.0] * 8])
    _, ids = grouped_topk.grouped_topk(rows, 3, True, 4, 2, "sigmoid")
    assert ids.tolist() == [[0, 1, 2], [6, 0, 1], [4, 6, 5], [0, 1, 2]]
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 0.5, 0.5])
    _, ids = grouped_topk.grouped_topk(rows[:1], 3, True, 4, 2, "sigmoid", bias)
    assert ids.tolist() == [[6, 7, 0]]
    weights, _ = grouped_topk.grouped_topk(torch.full((1, 8), -200.0), 2, True, 4, 2, "sigmoid")
    assert weights.tolist() == [[0, 0]]


def test_one_group_is_topk_softmax() -> None:
    logits = randn(9, 40)
    found = grouped_topk.grouped_topk(logits, 6, True)
    for a, b in zip(found, topk_softmax.topk_softmax(logits, 6, True), strict=False):
        torch.testing.assert_close(a, b)


def test_the_hosts_routers() -> None:
    x, logits, bias = randn(7, 4), randn(7, 16), randn(16, seed=1) / 10
    module = grouped_topk.VllmGroupedTopk(3, True, 4, 2, "sigmoid", 2.5)
    want = grouped_topk.grouped_topk(logits, 3, True, 4, 2, "sigmoid", bias, 2.5)
    fused = grouped_topk.vllm_fused_grouped_topk(x, logits, 3, True, bias, 4, 2, "sigmoid", 2.5)
    sglang = grouped_topk.sglang_biased_grouped_topk_gpu
    for found in (module(x, logits, bias), fused, sglang(x, logits, bias, 3, True, 4, 2, 0, 2.5, True)):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    torch.testing.assert_close(sglang(x, logits, bias, 3, True, 4, 2, 0, 2.5)[0] * 2.5, want[0])
    for call, says in (
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 5, 2), "16 experts cannot be 5 equal groups"),
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 4, 5), r"topk_group 5 is not in 1 \.\. 4"),
        (lambda: grouped_topk.grouped_topk(logits, 9, True, 4, 2), r"topk 9 is not in 1 \.\. 8"),
        (lambda: grouped_topk.grouped_topk(logits, 3, True, 4, 2, "tanh"), "scoring_func 'tanh' is neither"),
        (
            lambda: grouped_topk.grouped_topk(logits, 3, True, 16, 4, "sigmoid", bias),
            "of two or more a group",
        ),
        (lambda: module(x[:3], logits), "hidden_states has 3 tokens, gating_output 7"),
        (lambda: sglang(x, logits, bias, 3, True, 4, 2, 1), "num_fused_shared_experts=1 is not supported"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_sum_of_the_experts_that_are_here() -> None:
    parts, weights = randn(3, 4, 10), randn(3, 4, seed=1)
    ids, here = torch.tensor([[0, 1, 2, 3], [3, -1, 1, 0], [-1, 1, 3, -1]]), torch.tensor([0, -1, 1, -1])
    out = torch.full((3, 10), NAN)
    moe_sum.sglang_moe_sum_reduce_triton(parts, out, 2.5)
    close(out, 2.5 * parts.sum(1))
    moe_sum.vllm_moe_sum(parts, out)
    close(out, parts.sum(1))
    close(moe_sum.vllm_moe_fused_mul_sum(parts, weights), (parts * weights[..., None]).sum(1))
    parts[(ids < 0) | (here[ids.clamp(min=0)] < 0)] = NAN
    moe_sum.vllm_moe_sum(parts, out, ids, here)
    close(out, torch.stack((parts[0, 0] + parts[0, 2], parts[1, 3], torch.zeros(10))))
    found = moe_sum.vllm_moe_fused_mul_sum(parts, weights, out, ids, here)
    assert found is out
    close(out[1], parts[1, 3] * weights[1, 3])
    for call, says in (
        (lambda: moe_sum.vllm_moe_sum(parts, out[:2]), r"got \(3, 4, 10\) and \(2, 10\)"),
        (lambda: moe_sum.vllm_moe_sum(parts, out, ids[:2]), r"topk_ids \(2, 4\) must be \(3, 4\)"),
        (lambda: moe_sum.vllm_moe_sum(parts, out, None, here), "expert_map needs topk_ids"),
        (
            lambda: moe_sum.vllm_moe_fused_mul_sum(parts, weights, num_valid_tokens=here),
            "num_valid_tokens is not",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_experts_are_what_they_say() -> None:
    args = experts()
    args[4][3] = torch.tensor([-1, 7])  # a padded token
    want = by_hand(*args)
    close(fused_experts.fused_experts(*args), want)
    close(fused_experts.reference(*args), want)
    close(fused_experts.vllm_fused_experts(*args), want)


def test_experts_of_other_ranks_add_up() -> None:
    x, w1, w2, weights, ids = experts()
    parts = torch.zeros_like(x)
    for rank in range(2):
        here = torch.full((4,), -1, dtype=torch.int32)
        here[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        mine = slice(2 * rank, 2 * rank + 2)
        parts += fused_experts.vllm_fused_experts(
            x, w1[mine], w2[mine], weights, ids, global_num_experts=4, expert_map=here
        )
    close(parts, by_hand(x, w1, w2, weights, ids))


def test_weight_on_the_input() -> None:
    x, w1, w2, _, ids = experts(k=1)
    scale = torch.rand(9, 1) + 0.5
    want = by_hand(x * scale, w1, w2, torch.ones(9, 1), ids)
    close(
        fused_experts.vllm_fused_experts(x, w1, w2, scale, ids, apply_router_weight_on_input=True),
        want,
    )


FUNCTIONS = [t.cls for t in fused_experts.SPEC.targets if (t.host, t.seam) == ("sglang", "function")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sglang_experts(name: str) -> None:
    call, (x, w1, w2, weights, ids) = getattr(fused_experts, name), experts()
    want, before = by_hand(x, w1, w2, weights, ids), x.clone()
    out = call(x, w1, w2, (weights, ids, None), SimpleNamespace(inplace=False, routed_scaling_factor=0.5))
    close(out, want / 2)
    assert torch.equal(x, before)
    assert call(x, w1, w2, (weights, ids, None), SimpleNamespace(inplace=True)) is x
    close(x, want)
    for config, says in (
        ({"activation": "gelu"}, "moe_runner_config.activation='gelu'"),
        ({"is_gated": False}, "moe_runner_config.is_gated=False"),
        ({"gemm1_alpha": 1.7}, r"moe_runner_config.gemm1_alpha=1\.7"),
    ):
        with pytest.raises(ValueError, match=f"{says} is not supported"):
            call(x, w1, w2, (weights, ids, None), SimpleNamespace(**config))
    for given in ({"use_int8_w8a8": True}, {"block_shape": [128, 128]}, {"per_channel_quant": True}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}=.* is not supported"):
            call(x, w1, w2, (weights, ids, None), SimpleNamespace(), **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"activation": "gelu"}, "activation='gelu' is not supported"),
        ({"quant_config": SimpleNamespace(use_int8_w8a8=True)}, "quant_config.use_int8_w8a8=True is not"),
        ({"quant_config": SimpleNamespace(use_fp8_w8a8=True, w1_bias=1)}, "quant_config.w1_bias=1 is not"),
        ({"quant_config": SimpleNamespace(block_shape=[128, 128])}, r"block_shape=\[128, 128\] is not"),
        ({"expert_map": torch.zeros(4), "global_num_experts": 8}, "4 entries for 8 experts"),
    ],
)
def test_vllm_experts_refuse(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fused_experts.vllm_fused_experts(*experts(), **given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: randn(9, 23)}, r"hidden_states \(9, 23\) must be \[tokens, 24\]"),
        ({1: randn(4, 27, 24)}, r"w1 \(4, 27, 24\) must be"),
        ({2: randn(4, 24, 13)}, "w1 has 28 rows an expert, w2 13 columns"),
        ({3: randn(9, 3)}, r"topk_weights \(9, 3\) and topk_ids \(9, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_said(change: dict[int, torch.Tensor], says: str) -> None:
    args = [change.get(i, a) for i, a in enumerate(experts())]
    with pytest.raises(ValueError, match=says):
        fused_experts.fused_experts(*args)


def test_a_better_activation_is_used_at_once() -> None:
    """The experts call other ops by name: a candidate for silu_and_mul counts inside them."""
    args = experts()
    try:
        silu_and_mul.set_candidate(lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype))
        assert not fused_experts.fused_experts(*args).any()
    finally:
        silu_and_mul.set_candidate(None)
    close(fused_experts.fused_experts(*args), by_hand(*args))


@pytest.mark.parametrize("target", sparse_moe.SPEC.targets, ids=lambda t: t.cls)
def test_block_is_its_reference(target: Any) -> None:
    e, h, i = 5, 24, 14
    layer = () if target.host == "vllm" else (0,)
    moe = getattr(sparse_moe, target.cls)(e, 2, h, i, *layer, params_dtype=torch.float32, prefix="m")
    assert sorted(n for n, _ in moe.named_parameters()) == [
        "experts.w13_weight", "experts.w2_weight", "gate.weight",
    ]  # fmt: skip
    for n, p in enumerate(moe.parameters()):
        p.data = randn(*p.shape, seed=n)
    x = randn(2, 3, h, seed=9)
    ops = [registry.get(name).op for name in ("topk_softmax", "fused_experts")]
    before = [op.calls for op in ops]
    out = moe(x)
    assert out.shape == x.shape and [op.calls for op in ops] == [n + 1 for n in before]
    want = sparse_moe.reference(
        x.view(-1, h), moe.gate.weight, moe.experts.w13_weight, moe.experts.w2_weight, 2
    )
    close(out.view(-1, h), want)


class Negative(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        assert inputs["positions"] is not None
        return -hidden_states


@pytest.mark.parametrize("target", mixtral_decoder_layer.SPEC.targets, ids=lambda t: t.cls)
def test_layer_is_its_reference(target: Any) -> None:
    config = SimpleNamespace(
        hidden_size=24, intermediate_size=14, num_attention_heads=2, num_key_value_heads=1, head_dim=12,
        max_position_embeddings=64, rms_norm_eps=1e-5, num_local_experts=5, num_experts_per_tok=2, hidden_act="silu",
        sliding_window=9,
    )  # fmt: skip
    layer = getattr(mixtral_decoder_layer, target.cls)(config, prefix="model.layers.0")
    assert layer.self_attn.attn.window_left == (8 if target.host == "vllm" else -1)
    layer.self_attn = Negative()
    for n, (name, p) in enumerate(layer.named_parameters()):
        p.data = randn(*p.shape, seed=n) + ("norm" in name)
    x, residual = randn(7, 24, seed=50), randn(7, 24, seed=51)
    moe = layer.block_sparse_moe
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    weights = moe.gate.weight, moe.experts.w13_weight, moe.experts.w2_weight

    def around(before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return _layer_calls.around(
            x, before, norms, torch.neg, lambda h: sparse_moe.reference(h, *weights, 2), 1e-5
        )

    batch = {} if target.host == "vllm" else {"forward_batch": None}
    positions = torch.arange(7)
    if "residual" not in layer.forward.__code__.co_varnames[:5]:
        hidden, stream = around(None)
        close(layer(positions, x, **batch), hidden + stream)
        return
    for before in (None, residual):
        want = around(before)
        given = None if before is None else before.clone()
        for got, wanted in zip(layer(positions, x.clone(), residual=given, **batch), want, strict=True):
            close(got, wanted)


def test_no_token_of_a_case_is_between_two_experts() -> None:
    """Else a right router of another rounding gives another output, and is called wrong."""
    case = Case("c", {"tokens": 600, "experts": 60, "topk": 8, "hidden": 64, "intermediate": 8}, "bfloat16")
    x, gate, *_ = sparse_moe.SPEC.inputs(case, "cpu", torch.Generator().manual_seed(3))
    same_experts(x, gate, 8)


@pytest.mark.parametrize("seed,factor", [(6, 1.031), (7, 1.9), (8, 1.13), (14, 0.97)])
def test_nor_is_one_that_the_judge_has_scaled(seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(n, 4096, generator=generator).bfloat16() for n in (4096, 8))
    gate /= 64
    sparse_moe._decide(x, gate, 2, generator)
    same_experts(x * torch.tensor(factor).to(x), gate * torch.tensor(factor).to(gate), 2)


def same_experts(x: torch.Tensor, gate: torch.Tensor, top_k: int) -> None:
    exact = (x.double() @ gate.double().t()).topk(top_k).indices.sort().values
    assert torch.equal(exact, (x @ gate.t()).topk(top_k).indices.sort().values)


def test_block_says_what_is_wrong() -> None:
    moe = sparse_moe.VllmMixtralMoE(3, 2, 8, 6, prefix="m")
    w13 = moe.experts.w13_weight
    assert w13.weight_loader(w13, randn(6, 8), "", "w1", 0, True) is True
    for args, says in (
        (("w2", 0), "shard id 'w2' is not of this parameter"),
        (("w1", 3), r"expert 3 is not in 0 \.\. 2"),
    ):
        with pytest.raises(ValueError, match=says):
            w13.weight_loader(w13, randn(6, 8), "", *args)
    with pytest.raises(ValueError, match="quantized weights"):
        sparse_moe.VllmMixtralMoE(3, 2, 8, 6, quant_config=object())
    with pytest.raises(ValueError, match="dp_size=2"):
        sparse_moe.VllmMixtralMoE(3, 2, 8, 6, dp_size=2)
    with pytest.raises(ValueError, match="tp_size 4 is neither 1 nor the group's 1"):
        sparse_moe.VllmMixtralMoE(3, 2, 8, 6, tp_size=4)


@pytest.mark.parametrize(
    ("rows", "block"), [(0, 16), (8, 16), (16, 16), (17, 64), (32, 64), (128, 64), (129, 128)]
)
def test_blocks_hold_more_than_the_average_expert_has(rows: int, block: int) -> None:
    """Where weights are all the time: with a second block they are read again (docs/routing.md)."""
    now = _moe_tiles.tiles(rows, torch.bfloat16, True)
    assert now.block_m == block
    other = _moe_tiles.tiles(routing_time.larger(now), torch.bfloat16, True)
    assert other.block_m != block


@pytest.mark.parametrize("factor", [1.0, 0.93, 0.81])
def test_no_token_of_a_layer_is_between_two_experts(factor: float) -> None:
    """Nor where the judge has scaled all there is, which changes attention, too."""
    spec = mixtral_decoder_layer.SPEC
    sizes = {
        "hidden": 512,
        "heads": 8,
        "kv_heads": 2,
        "head_size": 64,
        "experts": 8,
        "topk": 2,
        "intermediate": 8,
    }
    lengths = {"q_lens": [900, 40, *[1] * 60], "seq_lens": [900, 70, *range(1, 121, 2)]}
    case = Case("c", {**lengths, "block_size": 16, **sizes}, "bfloat16")
    chosen = []
    for dtype in (torch.bfloat16, torch.float64):
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(1))
        floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
        args = [(a * factor).to(dtype) if f else a for a, f in zip(args, floats, strict=True)]
        gate, seen = args[-4], []
        _layer_calls.layer_reference(lambda h, seen=seen: seen.append(h) or h, *args[:-4])
        chosen.append((seen[0] @ gate.t()).topk(2).indices.sort().values)
    assert torch.equal(*chosen)
    assert (torch.bincount(chosen[0].flatten(), minlength=8) > 150).all()
