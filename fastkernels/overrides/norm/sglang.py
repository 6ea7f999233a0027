"""Drop-in normalizations for SGLang (sglang.srt.layers.layernorm)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.dispatcher import on_backend
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import CohereLayerNorm, layer_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.rms_norm_gated import (
    FusedGatedRMSNorm,
    GatedRMSNorm,
    MixerRMSNormGated,
    rms_norm_gated,
)


class SGLangRMSNorm_0_5_16(nn.Module):
    """RMSNorm before 0.5.21: weight [hidden_size]; x [..., hidden_size] to the same, in x's dtype.

    With a residual, returns (out, x + residual); the residual's memory is overwritten with the sum.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        cast_x_before_out_mul: bool = False,
        fp32_residual: bool = False,
        has_weight: bool = True,
        weight_dtype: torch.dtype | None = None,
        override_orig_dtype: torch.dtype | None = None,
        x_pad_to_multiple: int = 0,
    ) -> None:
        super().__init__()
        self.has_weight = has_weight
        self.cast_x_before_out_mul = cast_x_before_out_mul
        self.fp32_residual = fp32_residual
        self.override_orig_dtype = override_orig_dtype
        self.x_pad_to_multiple = x_pad_to_multiple
        weight = torch.ones(hidden_size, dtype=weight_dtype)
        self.weight = nn.Parameter(weight) if has_weight else weight
        self.variance_epsilon = eps
        self.hidden_size = hidden_size
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        quantized = getattr(getattr(module, "_quant_linear", None), "input_scale", None) is not None
        names = ("fp32_residual", "override_orig_dtype", "x_pad_to_multiple")
        off = [name for name in names if getattr(module, name, None)] + ["_quant_linear"] * quantized
        return f"{off[0]}={getattr(module, off[0])!r} is not supported" if off else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition  # new memory, as in the host
        how = (self.variance_epsilon, residual, self.variance_size_override, self.cast_x_before_out_mul)
        out = rms_norm(x, self.weight if self.has_weight else None, *how)
        return out if residual is None else (out, residual)


class SGLangRMSNorm(SGLangRMSNorm_0_5_16):
    """RMSNorm from 0.5.21 on; see SGLangRMSNorm_0_5_16."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        cast_x_before_out_mul: bool = False,
        fp32_residual: bool = False,
        has_weight: bool = True,
        weight_dtype: torch.dtype | None = None,
        override_orig_dtype: torch.dtype | None = None,
        x_pad_to_multiple: int = 0,
        force_native: bool = False,
    ) -> None:
        super().__init__(
            hidden_size, eps, var_hidden_size, cast_x_before_out_mul, fp32_residual, has_weight, weight_dtype,
            override_orig_dtype, x_pad_to_multiple,
        )  # fmt: skip

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: nn.Module | None = None,
        *,
        backend: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if backend is not None:
            return on_backend(self, backend, x, residual, post_residual_addition, quant_linear)
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition  # new memory, as in the host
        how = (self.variance_epsilon, residual, self.variance_size_override, self.cast_x_before_out_mul)
        out = rms_norm(x, self.weight if self.has_weight else None, *how)
        return out if residual is None else (out, residual)


class SGLangGemmaRMSNorm(nn.Module):
    """GemmaRMSNorm: weight [hidden_size], initially zeros; x [..., hidden_size] to the same, in x's dtype.

    With a residual, returns (out, x + residual); the residual's memory is overwritten with the sum, except with a
    post_residual_addition, where the sum is new memory, as in SGLang.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        *,
        backend: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if backend is not None:
            return on_backend(self, backend, x, residual, post_residual_addition)
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition
        out = gemma_rms_norm(x, self.weight, self.variance_epsilon, residual)
        return out if residual is None else (out, residual)


class SGLangGemma3RMSNorm_0_5_16(nn.Module):
    """Gemma3RMSNorm of 0.5.16: weight [dim], initially zeros; x [..., dim] to the same, in x's dtype."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gemma_rms_norm(x, self.weight, self.eps)


class SGLangGemma3RMSNorm(SGLangGemma3RMSNorm_0_5_16):
    """Gemma3RMSNorm from 0.5.17 on; see SGLangGemmaRMSNorm."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, backend: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if backend is not None:
            return on_backend(self, backend, x, residual)
        out = gemma_rms_norm(x, self.weight, self.eps, residual)
        return out if residual is None else (out, residual)


class SGLangLayerNorm(nn.Module):
    """LayerNorm: weight, bias [hidden_size] in `dtype`; x [..., hidden_size].

    As in SGLang, x is rounded to `dtype` first, the result is in x's dtype, and both parameters exist even if
    elementwise_affine or bias leaves them unused.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.hidden_size, self.variance_epsilon = hidden_size, eps
        self.elementwise_affine, self.use_bias, self.dtype = elementwise_affine, bias, dtype
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        weight = self.weight if self.elementwise_affine else None
        bias = self.bias if self.use_bias else None
        h = x if self.dtype == torch.float32 else x.to(self.dtype)  # the op computes in float32 by itself
        return layer_norm(h, weight, bias, self.variance_epsilon).to(x.dtype)


class SGLangGemma4RMSNorm(nn.Module):
    """Gemma4RMSNorm: x [..., dim] times the weight [dim], rounded once; ones without with_scale."""

    def __init__(
        self, dim: int, eps: float = 1e-6, scale_shift: float = 0.0, with_scale: bool = True
    ) -> None:
        super().__init__()
        self.with_scale, self.eps, self.scale_shift = with_scale, eps, scale_shift
        if with_scale:
            self.weight = nn.Parameter(torch.ones(dim))
        else:
            self.register_buffer("weight", torch.ones(dim), persistent=False)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return f"scale_shift={module.scale_shift}" if module.with_scale and module.scale_shift else None

    def forward(self, x: torch.Tensor, *, backend: Any = None) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x)
        return rms_norm(x, self.weight if self.with_scale else None, self.eps, None, None, False)


class SGLangRMSNormWithoutScale(nn.Module):
    """RMSNormWithoutScale: x [..., hidden_size] to the same, without a weight."""

    def __init__(self, hidden_size: int, eps=1e-6) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x, *, backend=None):
        if backend is not None:
            return on_backend(self, backend, x)
        return rms_norm(x, None, self.eps)


class SGLangCohereLayerNorm(CohereLayerNorm):
    """LayerNorm of Command R, without bias: (hidden_states [..., H], residuals), of which only the first changes."""


class SGLangCohere2MoeLayerNorm(nn.Module):
    """Cohere2MoeLayerNorm, without bias: hidden_states [..., hidden_size] to the same."""

    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return layer_norm(hidden_states, self.weight, None, self.variance_epsilon)


class SGLangGatedRMSNorm(GatedRMSNorm):
    """RMSNorm of flash-linear-attention: x, z [..., hidden_size]; the norm times act(z), or the norm of x act(z)."""

    def __init__(
        self,
        hidden_size,
        eps=1e-5,
        group_size=None,
        norm_before_gate=True,
        device=None,
        dtype=None,
        activation: str = "swish",
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype, activation)


class SGLangFusedRMSNormGated(FusedGatedRMSNorm):
    """FusedRMSNormGated of flash-linear-attention: x, g [..., hidden_size]; the norm times act(g)."""


class SGLangMixer2RMSNormGated(MixerRMSNormGated):
    """Mixer2RMSNormGated of Mamba 2: x, gate [..., full_hidden_size]; the norm of x silu(gate), in groups."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, gate: torch.Tensor, *, backend: Any = None
    ) -> torch.Tensor:
        if backend is not None:
            return on_backend(self, backend, x, gate)
        return rms_norm_gated(x, self.weight, gate, self.variance_epsilon, self.group_size, False)


def sglang_l2norm_fwd(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """flash-linear-attention's l2norm_fwd: x [..., D] to the same, in output_dtype or x's dtype."""
    return l2_norm(x, eps, output_dtype)


class SGLangL2Norm(nn.Module):
    """L2Norm of flash-linear-attention: x [..., D] to the same, in output_dtype or x's dtype."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return l2_norm(x, self.eps, self.output_dtype)


_HOST = "sglang.srt.layers.layernorm:"
_FLA = "sglang.kernels.ops.attention.fla."
_UNMEASURED = "on request: not measured yet against the host's Triton kernel on a GPU"
_L2_NOTE = "SGLang's linear attention binds the function at import: for forks and for our engine"

TARGETS = {
    "rms_norm": (
        Target("sglang", _HOST + "RMSNorm", "SGLangRMSNorm_0_5_16", "leaf", "<0.5.21", writes=("x",)),
        Target("sglang", _HOST + "RMSNorm", "SGLangRMSNorm", "leaf", ">=0.5.21", writes=("x",)),
        Target("sglang", _HOST + "Gemma4RMSNorm", "SGLangGemma4RMSNorm", "leaf"),
        Target("sglang", _HOST + "RMSNormWithoutScale", "SGLangRMSNormWithoutScale", "leaf"),
    ),
    "gemma_rms_norm": (
        Target("sglang", _HOST + "GemmaRMSNorm", "SGLangGemmaRMSNorm", "leaf", writes=("x",)),
        Target("sglang", _HOST + "Gemma3RMSNorm", "SGLangGemma3RMSNorm_0_5_16", "leaf", "<0.5.17"),
        Target("sglang", _HOST + "Gemma3RMSNorm", "SGLangGemma3RMSNorm", "leaf", ">=0.5.17"),
    ),
    "layer_norm": (
        Target("sglang", _HOST + "LayerNorm", "SGLangLayerNorm", "leaf"),
        Target("sglang", "sglang.srt.models.commandr:LayerNorm", "SGLangCohereLayerNorm", "leaf"),
        Target(
            "sglang", "sglang.srt.models.cohere2_moe:Cohere2MoeLayerNorm", "SGLangCohere2MoeLayerNorm", "leaf"
        ),
    ),
    "rms_norm_gated": (
        Target("sglang", _FLA + "layernorm_gated:RMSNorm", "SGLangGatedRMSNorm", "leaf", "", False, _UNMEASURED),
        Target(
            "sglang", "sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated:Mixer2RMSNormGated",
            "SGLangMixer2RMSNormGated", "leaf", "", False, _UNMEASURED, {"norm_before_gate": False},
        ),
        Target(
            "sglang", _FLA + "fused_norm_gate:FusedRMSNormGated", "SGLangFusedRMSNormGated", "leaf", "", False,
            _UNMEASURED,
        ),
    ),
    "l2_norm": (
        Target("sglang", _FLA + "l2norm:L2Norm", "SGLangL2Norm", "leaf"),
        Target("sglang", _FLA + "l2norm:l2norm_fwd", "sglang_l2norm_fwd", "function", note=_L2_NOTE),
    ),
}  # fmt: skip
