"""Float8 ops beyond their cases: fused against unfused, layouts, the hosts' functions, errors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernels.op_cases import make_args, mismatch, oracle

from fastkernels.core import registry
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.quant import quantize_fp8, rms_norm_quant_fp8, sglang, silu_mul_quant_fp8, vllm

FP8 = torch.float8_e4m3fn


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def usual_providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    for op in (rms_norm, silu_and_mul):
        op.reset()


def same(found: Any, wanted: Any) -> None:
    """Compare bit by bit."""
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.float(), b.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "how", [("static", -1), ("", -1), ("", 64), ("upper bound", -1), ("column-major", 32)], ids=str
)
def test_fused_equals_unfused(
    how: tuple[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The C++ kernels of a CPU round otherwise than PyTorch.
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "rms_norm:reference,silu_and_mul:reference")
    for op in (rms_norm, silu_and_mul):
        op.reset()
    kind, group = how
    scale = torch.tensor([0.02]) if kind == "static" else None
    scale_ub = torch.tensor([1.5]) if kind == "upper bound" else None
    column_major = kind == "column-major"
    x, weight = randn(9, 256).to(dtype), randn(128, seed=1).to(dtype)
    residual = randn(9, 128, seed=2).to(dtype)
    found = silu_mul_quant_fp8.silu_mul_quant_fp8(x, scale, group, scale_ub, 1 / 512, column_major)
    same(found, quantize_fp8.quantize_fp8(silu_and_mul(x), scale, group, scale_ub, 1 / 512, column_major))
    h, ours = x[:, 3:131], residual.clone()
    args = (scale, group, ours, scale_ub, 1 / 512, column_major)
    found = rms_norm_quant_fp8.rms_norm_quant_fp8(h, weight, 1e-5, *args)
    y = rms_norm(h, weight, 1e-5, residual, None, False)
    same(found, quantize_fp8.quantize_fp8(y, scale, group, scale_ub, 1 / 512, column_major))
    assert torch.equal(ours, residual)


def test_values_times_scales_approximate_the_input() -> None:
    x = randn(7, 3, 256) * torch.logspace(-3, 3, 7)[:, None, None]
    for group in (0, -1, 64):
        q, scales = quantize_fp8.quantize_fp8(x, None, group)
        width = x.shape[-1] // max(scales.shape[-1], 1) if group else x.shape[-1]
        back = (q.float().unflatten(-1, (-1, width)) * (scales.unsqueeze(-1) if group else scales)).flatten(
            -2
        )
        step = 2.0**-9 * (scales.max() if group == 0 else scales.repeat_interleave(width, dim=-1))
        assert ((back - x).abs() <= x.abs() / 16 + step / 2).all()
        largest = (back if group == 0 else back.unflatten(-1, (-1, width))).abs().float()
        assert torch.allclose(largest.max(), x.abs().max()), "the largest value is kept"


def test_ue8m0_scales_are_powers_of_two() -> None:
    x = torch.cat(
        (randn(5, 128) * 100, torch.full((1, 128), 448.0), torch.full((1, 128), 449.0), torch.zeros(1, 128))
    )
    q, scales = quantize_fp8.quantize_fp8(x, None, 128, None, 1e-10, False, False, True)
    exponents = scales.log2()
    assert torch.equal(exponents, exponents.round()) and scales[5:7, 0].tolist() == [1, 2]
    most = q.float().abs().amax(dim=-1)
    assert ((most[:-1] >= 224) & (most[:-1] <= 448)).all() and most[-1] == 0


def test_zeros_have_the_minimum_scale() -> None:
    """vLLM has a minimum for tokens, both hosts for groups; SGLang gives tokens of zeros the scale 0."""
    x = torch.zeros(2, 128).bfloat16()
    x[1, 0] = 1e-4
    for found, least in (
        (vllm.vllm_scaled_fp8_quant(x, use_per_token_if_dynamic=True), 1 / (448 * 512)),
        (vllm.vllm_per_token_group_quant_fp8(x, 128), 1e-10 / 448),
        (sglang.sglang_per_token_quant_fp8(x), 0.0),
    ):
        q, scales = found
        assert scales[0, 0].item() == pytest.approx(least) and not q[0].float().any()
        assert q[1].float().isfinite().all() and q[1, 0].float() > 0
    assert not quantize_fp8.quantize_fp8(x[:1], None, 0, None, 0.0)[0].float().any()
    assert quantize_fp8.quantize_fp8(x[:0])[1].tolist() == [pytest.approx(1 / (448 * 512))]


def test_scales_have_the_hosts_layout() -> None:
    x = randn(5, 512)
    plain = vllm.vllm_per_token_group_quant_fp8(x, 128)
    for function, aligned in (
        (vllm.vllm_per_token_group_quant_fp8, "tma_aligned_scales"),
        (sglang.sglang_per_token_group_quant_fp8, "scale_tma_aligned"),
    ):
        for flag, stride in ((False, (1, 5)), (True, (1, 8))):
            q, scales = function(x, 128, column_major_scales=True, **{aligned: flag})
            assert scales.stride() == stride and torch.equal(scales, plain[1])
            assert torch.equal(q.float(), plain[0].float())
    layer = vllm.VllmQuantFP8(False, vllm.GroupShape(1, 128), None, True, True)
    assert layer(x)[1].stride() == (1, 8)


def test_padding_and_given_outputs() -> None:
    x, scale = randn(5, 64), torch.tensor(0.02)
    q, scales = vllm.VllmQuantFP8(False, vllm.GroupShape(1, -1), 8)(x)
    assert q.shape == (8, 64) and scales.shape == (8, 1) and not q[5:].float().any()
    q, same_scale = sglang.sglang_scaled_fp8_quant(x, scale, 7)
    assert q.shape == (7, 64) and same_scale is scale
    assert sglang.sglang_static_quant_fp8(x, scale, True)[1].shape == (5, 1)
    out_q, out_s = torch.zeros(5, 64).to(FP8), torch.zeros(5, 1)
    found = sglang.sglang_per_token_quant_fp8(x, output_q=out_q, output_s=out_s)
    assert found[0] is out_q and found[1] is out_s and out_s.all() and out_q.float().any()
    out = torch.ones(5, 32).to(FP8)
    sglang.sglang_silu_mul_static_tensorwise_quant_for_cutlass_moe(x, out, scale, torch.tensor([3]), 5, 32)
    assert torch.equal(out[:3].float(), silu_mul_quant_fp8.silu_mul_quant_fp8(x, scale)[0][:3].float())
    assert (out[3:].float() == 1).all(), "rows after num_tokens_tensor stay"


def test_sglang_norm_keeps_the_residual() -> None:
    x, weight, residual = randn(3, 64), randn(64, seed=1), randn(3, 64, seed=2)
    before = residual.clone()
    (q, scales), new = sglang.sglang_fused_rmsnorm_fp8_per_token_quant(x, weight, 1e-5, residual)
    assert torch.equal(residual, before) and torch.equal(new, x + residual) and scales.shape == (3, 1)
    same((q, scales), sglang.sglang_fused_rmsnorm_fp8_per_token_quant(new, weight, 1e-5))
    theirs = vllm.vllm_rms_norm_dynamic_per_token_quant(x, weight, 1e-5, FP8, None, residual)
    same(theirs, (q, scales))
    assert torch.equal(residual, new)


X = torch.ones(4, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_fp8.quantize_fp8(X, None, 48), "64 columns are not a multiple of group_size 48"),
        (lambda: quantize_fp8.quantize_fp8(X, None, -2), "group_size -2 is neither"),
        (lambda: quantize_fp8.quantize_fp8(X, torch.ones(4)), r"one value, got shape \(4,\)"),
        (
            lambda: vllm.VllmQuantFP8(True, vllm.GroupShape(1, -1)),
            r"static scales of group_shape \(1,",
        ),
        (
            lambda: vllm.VllmQuantFP8(False, vllm.GroupShape(-1, 1)),
            r"group_shape \(-1, 1\) is not",
        ),
        (
            lambda: vllm.VllmQuantFP8(True, vllm.GroupShape(-1, -1))(X),
            "static quantization needs a scale",
        ),
        (
            lambda: sglang.sglang_per_token_group_quant_fp8(X, 64, masked_m=X),
            r"masked_m=Tensor\(4, 64\) is not supported",
        ),
        (
            lambda: sglang.sglang_per_token_group_quant_fp8(X, 64, 1e-10, True, True, True),
            "scale_ue8m0=True is not supported",
        ),
        (
            lambda: sglang.sglang_per_token_quant_fp8(X, torch.int8),
            r"dtype=torch.int8 is not supported",
        ),
        (lambda: silu_mul_quant_fp8.silu_mul_quant_fp8(X[:, :3]), r"2 \* d\], got shape \(4, 3\)"),
        (lambda: silu_mul_quant_fp8.silu_mul_quant_fp8(X, None, 0), "must be given"),
        (
            lambda: vllm.vllm_silu_mul_per_token_group_quant_fp8_colmajor(X, clamp_limit=7.0),
            "clamp_limit=7.0 is not supported",
        ),
        (
            lambda: rms_norm_quant_fp8.rms_norm_quant_fp8(X, torch.ones(3), 1e-5),
            r"weight \(3,\) does not match",
        ),
    ],
)
def test_unsupported_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_truncation_exceeds_the_tolerance() -> None:
    """The tolerance of float8 outputs is half a step, so a kernel that truncates fails."""
    spec = registry.get("quantize_fp8")
    case = next(c for c in spec.cases if c.name == "token_1000")
    args = make_args(spec, case)
    want = oracle(spec, args)
    q, scales = spec.op(*args)
    assert mismatch(spec, case, [q, scales], want) is None
    too_far = q.float().abs() > want[0].abs()
    cut = torch.where(too_far & (q.float() != 0), q.view(torch.uint8) - 1, q.view(torch.uint8)).view(FP8)
    assert "values wrong" in (mismatch(spec, case, [cut, scales], want) or "")
    assert "values wrong" in (mismatch(spec, case, [q, scales * (1 + 1e-5)], want) or "")


def test_float8_outputs_have_their_own_tolerance() -> None:
    spec = registry.get("quantize_fp8")
    case = SimpleNamespace(dtype="bfloat16")
    assert spec.tolerance_for(case, FP8) == spec.tolerance["float8_e4m3fn"]
    assert spec.tolerance_for(case, torch.float32) == spec.tolerance["bfloat16"]
    other = registry.get("rms_norm")
    assert other.tolerance_for(case, torch.float32) == other.tolerance["bfloat16"]
