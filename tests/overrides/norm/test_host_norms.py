"""Every norm class against its op's reference, and those of torch and transformers against the host's own class."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest
import torch
from torch import nn

from fastkernels.core import registry
from fastkernels.core.spec import Target
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm_gated import rms_norm_gated
from fastkernels.overrides.norm.sglang import SGLangFusedRMSNormGated, SGLangGemma4RMSNorm
from fastkernels.overrides.norm.torch import TorchLayerNorm, TorchRMSNorm
from fastkernels.overrides.norm.vllm import (
    VllmCohereLayerNorm,
    VllmFusedRMSNormGated,
    VllmMixer2RMSNormGated,
    VllmNemotronLayerNorm1P,
)

OPS = ("rms_norm", "gemma_rms_norm", "layer_norm", "rms_norm_gated", "t5_layer_norm")
CLASSES = sorted({(n, t.cls) for n in OPS for t in registry.get(n).targets})
HIDDEN = 72


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def listed(host: str) -> list[tuple[str, Target]]:
    """(op, target) of each class for the installed version of the host."""
    version = importlib.metadata.version(host)
    found = {t.cls: (n, t) for n in OPS for t in registry.get(n).targets_for(host, version)}
    return sorted(found.values(), key=lambda pair: pair[1].cls)


def made(cls: Any, dtype: torch.dtype) -> nn.Module:
    name = cls.__name__
    if "Zamba2" in name:
        module = cls(HIDDEN, 24, 1e-3)
    elif name == "Llama4TextL2Norm":
        module = cls(1e-3)
    else:
        module = cls(HIDDEN) if name == "OlmoLayerNorm" else cls(HIDDEN, eps=1e-3)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(1 + 0.3 * some(*parameter.shape, seed=i + 1))
    return module.to(dtype)


def gates(cls: Any) -> list[tuple[torch.Tensor, ...]]:
    if "Gated" not in cls.__name__:
        return [()]
    return [(some(2, 5, HIDDEN, seed=9),)] + ([()] if "Mamba" in cls.__name__ else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "target"), listed("transformers"), ids=lambda v: getattr(v, "cls", ""))
@torch.inference_mode()
def test_class_equals_that_of_transformers(name: str, target: Target, dtype: torch.dtype) -> None:
    """Bit for bit in float32; in bfloat16 the sums of squares may differ in the last bit, and with them a rounding."""
    module, _, cls = target.path.partition(":")
    host = made(getattr(importlib.import_module(module), cls), dtype)
    ours = registry.target_class(target)
    if hasattr(ours, "supports"):
        assert ours.supports(host) is None
    for gate in gates(type(host)):
        args = (2 * some(2, 5, HIDDEN, dtype=dtype), *(g.to(dtype) for g in gate))
        want, before = host(*args), registry.get(name).op.calls
        found = ours.forward(host, *args)
        assert found.dtype == want.dtype and registry.get(name).op.calls == before + 1
        tolerance = 1e-6 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
        assert (found == want).float().mean() > (0.5 if dtype == torch.float32 else 0.97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("affine", [False, True])
@torch.inference_mode()
def test_class_equals_that_of_torch(affine: bool, dtype: torch.dtype) -> None:
    x = 2 * some(2, 5, HIDDEN, dtype=dtype) + 1
    for ours, host in ((TorchLayerNorm, nn.LayerNorm), (TorchRMSNorm, nn.RMSNorm)):
        theirs = host(HIDDEN, 1e-3, affine)
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(some(*parameter.shape, seed=i + 1))
        theirs = theirs.to(dtype)
        mine = ours(HIDDEN, 1e-3, affine).to(dtype)
        mine.load_state_dict(theirs.state_dict())
        for found in (mine(x), ours.forward(theirs, x)):
            assert found.dtype == dtype
            torch.testing.assert_close(
                found, theirs(x), atol=1e-5, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5
            )


def test_torch_norms_that_ops_do_not_compute_are_named() -> None:
    assert (
        TorchLayerNorm.supports(nn.LayerNorm(9)) is None
        and TorchRMSNorm.supports(nn.RMSNorm(9, 1e-5)) is None
    )
    assert "last 2 dimensions" in (TorchLayerNorm.supports(nn.LayerNorm((3, 9))) or "")
    assert "eps is None" in (TorchRMSNorm.supports(nn.RMSNorm(9)) or "")


def test_variants_that_ops_do_not_compute_are_named() -> None:
    assert "weight has shape (4, 9)" in (VllmCohereLayerNorm.supports(VllmCohereLayerNorm((4, 9))) or "")
    assert "scale_shift=1.0" in (SGLangGemma4RMSNorm.supports(SGLangGemma4RMSNorm(9, scale_shift=1.0)) or "")
    gated = VllmFusedRMSNormGated(9)
    gated.activation = "gelu"
    assert "'gelu'" in (VllmFusedRMSNormGated.supports(gated) or "")
    mixer = VllmMixer2RMSNormGated(36, 3)
    assert VllmMixer2RMSNormGated.supports(mixer) is None
    mixer.tp_size = 2
    assert "3 groups of channels are sharded over 2 ranks" in (VllmMixer2RMSNormGated.supports(mixer) or "")
    with pytest.raises(ValueError, match="use_rms_norm"):
        VllmMixer2RMSNormGated(36, 3, use_rms_norm=False)
    for cls in (VllmFusedRMSNormGated, SGLangFusedRMSNormGated):
        with pytest.raises(ValueError, match="residual and prenorm are not supported"):
            cls(9)(torch.ones(2, 9), torch.ones(2, 9), torch.ones(2, 9))


def test_unsupported_arguments_are_named() -> None:
    x, w = torch.ones(2, 6), torch.ones(6)
    with pytest.raises(ValueError, match="must be 'silu' or 'sigmoid', got 'gelu'"):
        rms_norm_gated(x, w, None, 1e-6, None, True, "gelu")
    with pytest.raises(ValueError, match="group_size 4 does not divide 6 channels"):
        rms_norm_gated(x, w, None, 1e-6, 4)
    with pytest.raises(ValueError, match=r"gate \(2, 3\) is not for x \(2, 6\)"):
        rms_norm_gated(x, w, torch.ones(2, 3), 1e-6)
    with pytest.raises(ValueError, match=r"weight \(3,\) is not for x \(2, 6\)"):
        rms_norm_gated(x, torch.ones(3), None, 1e-6)


def test_nemotron_rounds_one_plus_weight() -> None:
    norm = VllmNemotronLayerNorm1P(6).bfloat16()
    norm.weight.data.fill_(2**-9)
    x = some(2, 6).bfloat16()
    assert torch.equal(norm(x), layer_norm(x, None, None, 1e-5)), (
        "1 + weight is rounded to the weight's dtype"
    )
