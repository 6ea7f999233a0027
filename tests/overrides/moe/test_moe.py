"""Tests of fused_experts, sparse_moe and Mixtral's layer: host functions, ties, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fk_bench.routing import expert_times
from support.modules import randn

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.block import cases as block_cases
from fastkernels.overrides.block import mixtral_decoder_layer
from fastkernels.overrides.moe import fused_experts, moe_tiles, sparse_moe
from fastkernels.overrides.moe.sglang import quant_of
from fastkernels.overrides.moe.vllm import VllmFusedMoEKernel, VllmMixtralMoE, vllm_fused_experts


def experts(tokens: int = 9, e: int = 4, k: int = 2, h: int = 24, i: int = 14) -> list[torch.Tensor]:
    """Return hidden_states, w1, w2, topk_weights, topk_ids."""
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


def test_experts_equal_naive_loop() -> None:
    args = experts()
    args[4][3] = torch.tensor([-1, 7])  # a padded token
    want = by_hand(*args)
    close(fused_experts.fused_experts(*args), want)
    close(fused_experts.reference(*args), want)
    close(vllm_fused_experts(*args), want)


@pytest.mark.parametrize("name", ["fused_experts", "fused_experts_gelu", "fused_experts_int4"])
def test_reference_overflows_where_the_op_does(name: str) -> None:
    """In float16 the activation of the first product may be infinite, as in production's kernels."""
    spec = registry.get(name)
    sizes = {"tokens": 33, "experts": 5, "topk": 2, "hidden": 64, "intermediate": 64}
    more = {"group": 32} if name == "fused_experts_int4" else {}
    args = spec.inputs(Case("x", {**sizes, **more}, "float16"), "cpu", torch.Generator().manual_seed(0))
    args[0] *= 96
    found, expected = spec.op(*args), spec.reference(*args)
    assert 0 < found.isfinite().sum() < found.numel()
    torch.testing.assert_close(found, expected, atol=8.0, rtol=2e-3, equal_nan=True)


def test_expert_parallel_parts_add_up() -> None:
    x, w1, w2, weights, ids = experts()
    parts = torch.zeros_like(x)
    for rank in range(2):
        here = torch.full((4,), -1, dtype=torch.int32)
        here[2 * rank : 2 * rank + 2] = torch.arange(2, dtype=torch.int32)
        mine = slice(2 * rank, 2 * rank + 2)
        parts += vllm_fused_experts(
            x, w1[mine], w2[mine], weights, ids, global_num_experts=4, expert_map=here
        )
    close(parts, by_hand(x, w1, w2, weights, ids))


def test_router_weight_on_input() -> None:
    x, w1, w2, _, ids = experts(k=1)
    scale = torch.rand(9, 1) + 0.5
    want = by_hand(x * scale, w1, w2, torch.ones(9, 1), ids)
    close(
        vllm_fused_experts(x, w1, w2, scale, ids, apply_router_weight_on_input=True),
        want,
    )


FUNCTIONS = [
    t.cls for t in registry.get("fused_experts").targets if (t.host, t.seam) == ("sglang", "function")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sglang_functions_equal_naive_loop(name: str) -> None:
    call, (x, w1, w2, weights, ids) = registry.op_class("fused_experts", name), experts()
    want, before = by_hand(x, w1, w2, weights, ids), x.clone()
    out = call(x, w1, w2, (weights, ids, None), SimpleNamespace(inplace=False, routed_scaling_factor=0.5))
    close(out, want / 2)
    assert torch.equal(x, before)
    assert call(x, w1, w2, (weights, ids, None), SimpleNamespace(inplace=True)) is x
    close(x, want)
    for config, message in (
        ({"activation": "gelu"}, "moe_runner_config.activation='gelu'"),
        ({"is_gated": False}, "moe_runner_config.is_gated=False"),
        ({"gemm1_alpha": 1.7}, r"moe_runner_config.gemm1_alpha=1\.7"),
    ):
        with pytest.raises(ValueError, match=f"{message} is not supported"):
            call(x, w1, w2, (weights, ids, None), SimpleNamespace(**config))
    for given in ({"use_int8_w8a8": True}, {"block_shape": [128, 128]}, {"per_channel_quant": True}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}=.* is not supported"):
            call(x, w1, w2, (weights, ids, None), SimpleNamespace(), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"activation": "gelu"}, "activation='gelu' is not supported"),
        ({"quant_config": SimpleNamespace(use_int8_w8a8=True)}, "quant_config.use_int8_w8a8=True is not"),
        ({"quant_config": SimpleNamespace(use_fp8_w8a8=True, w1_bias=1)}, "quant_config.w1_bias=1 is not"),
        ({"quant_config": SimpleNamespace(block_shape=[128, 128])}, r"block_shape=\[128, 128\] is not"),
        ({"expert_map": torch.zeros(4), "global_num_experts": 8}, "4 entries for 8 experts"),
    ],
)
def test_vllm_function_rejects_unsupported_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_fused_experts(*experts(), **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: randn(9, 23)}, r"hidden_states \(9, 23\) must be \[tokens, 24\]"),
        ({1: randn(4, 27, 24)}, r"w1 \(4, 27, 24\) must be"),
        ({2: randn(4, 24, 13)}, "w1 has 28 rows per expert, not twice the 13 columns of w2"),
        ({3: randn(9, 3)}, r"topk_weights \(9, 3\) and topk_ids \(9, 2\)"),
    ],
)
def test_mismatched_shapes_are_rejected(change: dict[int, torch.Tensor], message: str) -> None:
    args = [change.get(i, a) for i, a in enumerate(experts())]
    with pytest.raises(ValueError, match=message):
        fused_experts.fused_experts(*args)


def test_candidate_of_inner_op_is_used() -> None:
    """The experts call silu_and_mul by name, so a candidate for it runs inside them."""
    args = experts()
    try:
        silu_and_mul.set_candidate(lambda x: torch.zeros(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype))
        assert not fused_experts.fused_experts(*args).any()
    finally:
        silu_and_mul.set_candidate(None)
    close(fused_experts.fused_experts(*args), by_hand(*args))


@pytest.mark.parametrize("target", registry.get("sparse_moe").targets, ids=lambda t: t.cls)
def test_block_equals_reference(target: Any) -> None:
    e, h, i = 5, 24, 14
    layer = () if target.host == "vllm" else (0,)
    moe = registry.target_class(target)(e, 2, h, i, *layer, params_dtype=torch.float32, prefix="m")
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


@pytest.mark.parametrize("target", registry.get("mixtral_decoder_layer").targets, ids=lambda t: t.cls)
def test_layer_equals_reference(target: Any) -> None:
    config = SimpleNamespace(
        hidden_size=24, intermediate_size=14, num_attention_heads=2, num_key_value_heads=1, head_dim=12,
        max_position_embeddings=64, rms_norm_eps=1e-5, num_local_experts=5, num_experts_per_tok=2, hidden_act="silu",
        sliding_window=9,
    )  # fmt: skip
    layer = registry.target_class(target)(config, prefix="model.layers.0")
    assert layer.self_attn.attn.window_left == (8 if target.host == "vllm" else -1)
    layer.self_attn = Negative()
    for n, (name, p) in enumerate(layer.named_parameters()):
        p.data = randn(*p.shape, seed=n) + ("norm" in name)
    x, residual = randn(7, 24, seed=50), randn(7, 24, seed=51)
    moe = layer.block_sparse_moe
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    weights = moe.gate.weight, moe.experts.w13_weight, moe.experts.w2_weight

    def around(before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return block_cases.around(
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


def test_inputs_of_block_have_no_ties() -> None:
    """With a tie, a correct router that rounds differently would give another output."""
    case = Case("c", {"tokens": 600, "experts": 60, "topk": 8, "hidden": 64, "intermediate": 8}, "bfloat16")
    x, gate, *_ = sparse_moe.SPEC.inputs(case, "cpu", torch.Generator().manual_seed(3))
    same_experts(x, gate, 8)


@pytest.mark.parametrize("seed,factor", [(6, 1.031), (7, 1.9), (8, 1.13), (14, 0.97)])
def test_scaled_inputs_have_no_ties(seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(n, 4096, generator=generator).bfloat16() for n in (4096, 8))
    gate /= 64
    sparse_moe._decide(x, gate, 2, generator)
    same_experts(x * torch.tensor(factor).to(x), gate * torch.tensor(factor).to(gate), 2)


def same_experts(x: torch.Tensor, gate: torch.Tensor, top_k: int) -> None:
    exact = (x.double() @ gate.double().t()).topk(top_k).indices.sort().values
    assert torch.equal(exact, (x @ gate.t()).topk(top_k).indices.sort().values)


def test_block_rejects_invalid_arguments() -> None:
    moe = VllmMixtralMoE(3, 2, 8, 6, prefix="m")
    w13 = moe.experts.w13_weight
    assert w13.weight_loader(w13, randn(6, 8), "", "w1", 0, True) is True
    for args, message in (
        (("w2", 0), "shard id 'w2' does not belong to this parameter"),
        (("w1", 3), r"expert 3 is not in 0 \.\. 2"),
    ):
        with pytest.raises(ValueError, match=message):
            w13.weight_loader(w13, randn(6, 8), "", *args)
    with pytest.raises(ValueError, match="quantized weights"):
        VllmMixtralMoE(3, 2, 8, 6, quant_config=object())
    with pytest.raises(ValueError, match="dp_size=2"):
        VllmMixtralMoE(3, 2, 8, 6, dp_size=2)
    with pytest.raises(ValueError, match="tp_size 4 is neither 1 nor the group's 1"):
        VllmMixtralMoE(3, 2, 8, 6, tp_size=4)


@pytest.mark.parametrize(
    ("rows", "block"), [(0, 16), (8, 16), (16, 16), (17, 64), (32, 64), (128, 64), (129, 128)]
)
def test_block_size_exceeds_average_rows(rows: int, block: int) -> None:
    """An expert with a second block reads its weights twice (docs/reports/2026-11-routing.md)."""
    now = moe_tiles.tiles(rows, torch.bfloat16, True)
    assert now.block_m == block
    other = moe_tiles.tiles(expert_times.larger(now), torch.bfloat16, True)
    assert other.block_m != block


@pytest.mark.parametrize("factor", [1.0, 0.93, 0.81])
def test_inputs_of_layer_have_no_ties(factor: float) -> None:
    """The judge scales all inputs, which also changes attention."""
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
        block_cases.layer_reference(lambda h, seen=seen: seen.append(h) or h, *args[:-4])
        chosen.append((seen[0] @ gate.t()).topk(2).indices.sort().values)
    assert torch.equal(*chosen)
    assert (torch.bincount(chosen[0].flatten(), minlength=8) > 150).all()


@pytest.mark.parametrize(
    ("experts_class", "exchange", "runs"),
    [("TritonExperts", "MoEPrepareAndFinalizeNoDPEPModular", True),
     ("FlashInferExperts", "MoEPrepareAndFinalizeNoDPEPModular", False),
     ("TritonExperts", "DeepEPHTPrepareAndFinalize", False)],
)  # fmt: skip
def test_weights_in_another_order_are_refused(experts_class: str, exchange: str, runs: bool) -> None:
    inside, outside = (type(name, (), {"quant_config": None})() for name in (experts_class, exchange))
    x, w1, w2, weights, ids = experts()
    kernel = VllmFusedMoEKernel(outside, inside)
    if runs:
        close(kernel.apply(x, w1, w2, ids, weights), fused_experts.fused_experts(x, w1, w2, weights, ids))
    else:
        with pytest.raises(ValueError, match="is not one of TritonExperts"):
            kernel.apply(x, w1, w2, ids, weights)


def test_weights_of_sglangs_other_backends_are_refused() -> None:
    info = type("FlashInferCutlassMoeQuantInfo", (), {})()
    with pytest.raises(ValueError, match="FlashInferCutlassMoeQuantInfo is not TritonMoeQuantInfo"):
        quant_of(info)
