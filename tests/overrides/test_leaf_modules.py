"""Activation and norm modules against plain PyTorch, host by host, and how kernels address the rows of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.core import registry
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul
from fastkernels.overrides.activation.vllm import VllmGeluAndMul
from fastkernels.overrides.kit.rows import rows, unsupported_rows, unsupported_vector
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.sglang import SGLangGemmaRMSNorm, SGLangL2Norm, SGLangLayerNorm
from fastkernels.overrides.norm.t5_layer_norm import t5_layer_norm
from fastkernels.overrides.norm.transformers import TransformersT5LayerNorm, transformers_l2norm
from fastkernels.overrides.norm.vllm import VllmLayerNorm, vllm_l2norm_fwd

OPS = ("gelu_and_mul", "gemma_rms_norm", "layer_norm")
COMMON = ("GeluAndMul", "GeluAndMulTanh", "GemmaRMSNorm", "Gemma3RMSNorm", "layernorm:LayerNorm")
TARGETS = sorted(
    {(name, t.host, t.cls) for name in OPS for t in registry.get(name).targets if t.path.endswith(COMMON)}
)
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}
ELEMENTWISE = ("gelu", "quick_gelu", "relu2")
ACTIVATIONS = sorted(
    {(n, t.cls) for n in ELEMENTWISE for t in registry.get(n).targets if t.host != "diffusers"}
)  # diffusers' have a linear layer: tests/support/exported.py


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "host", "cls"), TARGETS, ids=lambda v: v)
@torch.inference_mode()
def test_module_equals_the_formula(name: str, host: str, cls: str, dtype: torch.dtype) -> None:
    made = registry.op_class(name, cls)
    x = 3 * randn(7, 126).to(dtype) + 1
    if name == "gelu_and_mul":
        module = made()
        expected = F.gelu(x[:, :63].float(), approximate="none" if host == "vllm" else "tanh") * x[:, 63:]
    elif name == "gemma_rms_norm":
        module = made(126, 1e-3)
        assert not module.weight.any()
        module.weight.copy_(randn(126, seed=1))
        expected = gemma(x, module.weight, 1e-3)
    else:
        module = made(126, bias=True, eps=1e-3) if host == "fla" else made(126, 1e-3)
        module.weight.copy_(randn(126, seed=1))
        module.bias.copy_(randn(126, seed=2))
        expected = F.layer_norm(x.float(), (126,), module.weight, module.bias, 1e-3)
    before = registry.get(name).op.calls
    out = module(x)
    assert out.dtype == dtype and registry.get(name).op.calls == before + 1
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cls", ["VllmGemmaRMSNorm", "SGLangGemmaRMSNorm", "SGLangGemma3RMSNorm"])
@torch.inference_mode()
def test_gemma_adds_the_residual_in_place(cls: str) -> None:
    module = registry.op_class("gemma_rms_norm", cls)(63)
    module.weight.copy_(randn(63))
    x, residual = randn(5, 63, seed=1), randn(5, 63, seed=2)
    total = x + residual
    out, new = module(x, residual)
    assert new is residual and torch.equal(residual, total)
    torch.testing.assert_close(out, gemma(total, module.weight, 1e-6))


@torch.inference_mode()
def test_sglang_gemma_post_residual_addition() -> None:
    module = SGLangGemmaRMSNorm(63)
    x, residual, more = (randn(5, 63, seed=i) for i in range(3))
    kept = residual.clone()
    out, total = module(x, residual, more)
    torch.testing.assert_close(total, x + kept + more)
    torch.testing.assert_close(out, gemma(total, module.weight, 1e-6))
    assert torch.equal(residual, kept)


@torch.inference_mode()
def test_layer_norm_parameters_follow_the_flags() -> None:
    assert [n for n, _ in VllmLayerNorm(9).named_parameters()] == ["weight", "bias"]
    assert [n for n, _ in VllmLayerNorm(9, bias=False).named_parameters()] == ["weight"]
    bare = VllmLayerNorm(9, elementwise_affine=False)
    assert not list(bare.parameters())
    assert VllmLayerNorm(9, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    x = randn(4, 9)
    torch.testing.assert_close(bare(x), F.layer_norm(x, (9,)))
    unused = SGLangLayerNorm(9, elementwise_affine=False, bias=False)
    for parameter in unused.parameters():
        parameter.fill_(3.0)
    torch.testing.assert_close(unused(x), F.layer_norm(x, (9,), eps=1e-6))
    rounded = SGLangLayerNorm(9, dtype=torch.bfloat16)
    assert rounded(x).dtype == torch.float32 and torch.equal(rounded(x), rounded(x).bfloat16().float())


def test_unsupported_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="must be 'none' or 'tanh', got 'sigmoid'"):
        VllmGeluAndMul("sigmoid")
    with pytest.raises(ValueError, match="got 'erf'"):
        gelu_and_mul(torch.ones(2, 4), "erf")
    with pytest.raises(ValueError, match=r"2 \* d\], got shape \(2, 3\)"):
        gelu_and_mul(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"weight \(4,\) is not for x \(2, 5\)"):
        gemma_rms_norm(torch.ones(2, 5), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match=r"residual \(1, 5\) is not for x \(2, 5\)"):
        gemma_rms_norm(torch.ones(2, 5), torch.ones(5), 1e-6, torch.ones(1, 5))
    with pytest.raises(ValueError, match=r"bias \(4,\) is not for x \(2, 5\)"):
        layer_norm(torch.ones(2, 5), None, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        gelu(torch.ones(2, 4), "erf")
    with pytest.raises(ValueError, match=r"weight \(4,\) is not for x \(2, 5\)"):
        t5_layer_norm(torch.ones(2, 5), torch.ones(4), 1e-6)
    module = VllmGeluAndMul()
    assert VllmGeluAndMul.supports(module) is None
    module.approximate = "fast"
    assert "approximate='fast'" in (VllmGeluAndMul.supports(module) or "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "cls"), ACTIVATIONS, ids=lambda v: v)
def test_activation_equals_the_formula(name: str, cls: str, dtype: torch.dtype) -> None:
    module = registry.op_class(name, cls)()
    assert not list(module.parameters()) and not list(module.buffers())
    with_erf = cls in ("VllmGELU", "TransformersGELUActivation", "TimmGELU", "TorchGELU")
    formula = PLAIN["gelu_tanh" if name == "gelu" and not with_erf else name]
    x = 3 * randn(7, 126).to(dtype)
    before = registry.get(name).op.calls
    out = module(x)
    assert out.dtype == dtype and registry.get(name).op.calls == before + 1
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.double(), formula(x.double()), atol=tolerance, rtol=tolerance)


def test_t5_norm_returns_the_weights_dtype() -> None:
    """As in transformers: T5 in float16 keeps some projections in float32, and the norm returns float16."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for x_dtype, w_dtype in itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2):
        theirs, ours = T5LayerNorm(63, 1e-3).to(w_dtype), TransformersT5LayerNorm(63, 1e-3).to(w_dtype)
        with torch.no_grad():
            theirs.weight.copy_(randn(63))
        ours.load_state_dict(theirs.state_dict())
        x = (3 * randn(4, 5, 63, seed=1)).to(x_dtype)
        assert theirs(x).dtype == ours(x).dtype == w_dtype
        torch.testing.assert_close(ours(x), theirs(x))


def test_l2_norm_equals_the_hosts() -> None:
    """A sum rather than a mean, eps inside the root, the requested dtype, and any dimension."""
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    x = randn(3, 5, 63)
    torch.testing.assert_close(vllm_l2norm_fwd(x, 0.5), x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt())
    assert vllm_l2norm_fwd(x, output_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert SGLangL2Norm(output_dtype=torch.float16)(x).dtype == torch.float16
    for dim in (-1, 0, 1):
        torch.testing.assert_close(transformers_l2norm(x, dim, 1e-2), l2norm(x, dim, 1e-2))
    assert not vllm_l2norm_fwd(torch.zeros(2, 4)).any()


def layouts() -> list[torch.Tensor]:
    base = torch.empty(3, 4, 5, 6)
    permuted = [base.permute(*p, 3) for p in itertools.permutations(range(3))]
    sliced = [
        base[:, 1:3],
        base[..., :4],
        base[:, :, 2],
        base[1, 2, 3],
        base[::2, :, ::2],
        base.flatten(0, 2),
    ]
    unit = [torch.empty(1, 4, 1, 5, 6).transpose(1, 3), torch.empty(4, 1), torch.empty(7, 3, 4, 5, 6)]
    return [*permuted, *sliced, *unit, base.transpose(0, 2)[:, 1:, :1]]


@pytest.mark.parametrize("x", layouts(), ids=lambda x: f"{tuple(x.shape)}{tuple(x.stride())}")
def test_rows_address_every_row(x: torch.Tensor) -> None:
    steps: list[Any] = [
        range(0, n * s, s) if s else [0] * n for n, s in zip(x.shape, x.stride(), strict=True)
    ]
    starts = [sum(at) for at in itertools.product(*steps[:-1])]
    found = rows(x)
    if found is None:  # more than two different strides
        assert len([n for n in x.shape[:-1] if n > 1]) > 2
        assert "rows need at most two" in (unsupported_rows(x) or "")
        return
    n_inner, outer, inner = found
    assert [r // n_inner * outer + r % n_inner * inner for r in range(len(starts))] == starts
    assert unsupported_rows(x) is None


def test_rows_of_strided_elements_are_unsupported() -> None:
    assert rows(torch.empty(4, 6).t()) is None and rows(torch.tensor(1.0)) is None
    assert "dtype torch.float64" in (unsupported_rows(torch.ones(3, dtype=torch.float64)) or "")
    assert unsupported_vector(None, "bias") is None and unsupported_vector(torch.ones(3), "bias") is None
    assert "bias of dtype torch.float32 has strides (2,)" in (
        unsupported_vector(torch.ones(6)[::2], "bias") or ""
    )
    assert "torch.float64" in (unsupported_vector(torch.ones(3, dtype=torch.float64), "weight") or "")
