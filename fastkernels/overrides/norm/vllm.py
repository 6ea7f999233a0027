"""Drop-in normalizations for vLLM (vllm.model_executor.layers.layernorm)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.spec import Target
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import (
    CohereLayerNorm,
    layer_norm,
    one_more,
    unsupported_shape,
    unsupported_weight,
)
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.rms_norm_gated import (
    FusedGatedRMSNorm,
    GatedRMSNorm,
    MixerRMSNormGated,
)


class VllmRMSNorm(nn.Module):
    """RMSNorm: weight [hidden_size]; x [..., hidden_size] to the same, in x's dtype.

    With a residual, returns (out, x + residual); the residual's memory is overwritten with the sum. Compiled code
    rounds once, after the product with the weight, as Inductor does with vLLM's layer; eager code also before it.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        self.has_weight = has_weight
        weight = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        self.weight = nn.Parameter(weight) if has_weight else weight

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        weight = self.weight if self.has_weight else None
        eager = not torch.compiler.is_dynamo_compiling()
        out = rms_norm(x, weight, self.variance_epsilon, residual, self.variance_size_override, eager)
        return out if residual is None else (out, residual)


class VllmGemmaRMSNorm(nn.Module):
    """GemmaRMSNorm: weight [hidden_size], initially zeros; x [..., hidden_size] to the same, in x's dtype.

    With a residual, returns (out, x + residual); the residual's memory is overwritten with the sum.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = gemma_rms_norm(x, self.weight, self.variance_epsilon, residual)
        return out if residual is None else (out, residual)


class VllmLayerNorm_0_26(nn.Module):
    """LayerNorm before 0.32: weight, bias [dim] in float32; x [..., dim]."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(dim, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class VllmLayerNorm(nn.Module):
    """LayerNorm from 0.32 on: x [..., hidden_size] to the same, in x's dtype.

    weight and bias [hidden_size] in `dtype` (default: torch's); None without elementwise_affine, or without bias.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (hidden_size,), eps
        made = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        self.weight = nn.Parameter(made) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros_like(made)) if elementwise_affine and bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class VllmTPAwareRMSNorm(VllmRMSNorm):
    """TPAwareRMSNorm of models from transformers; sharded inputs, which the host gathers, are not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_rank, self.tp_size = parallel.get_tp_rank(), parallel.get_tp_size()

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_ranks(module)


class VllmTPAwareGemmaRMSNorm(VllmGemmaRMSNorm):
    """TPAwareGemmaRMSNorm; see VllmTPAwareRMSNorm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_rank, self.tp_size = parallel.get_tp_rank(), parallel.get_tp_size()

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_ranks(module)


def unsupported_ranks(module: nn.Module) -> str | None:
    """Why a norm whose input may be sharded is the host's, or None."""
    return None if module.tp_size == 1 else f"its input may be sharded over {module.tp_size} ranks"


class VllmCohereRMSNorm(nn.Module):
    """RMSNorm of Command R and Cohere 2 MoE: (hidden_states [..., H], residuals), of which only the first changes."""

    def __init__(self, param_shape=None, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(param_shape))
        self.variance_epsilon = eps

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_weight(module)

    def forward(self, hidden_states, residuals=None):
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, None, None, False), residuals


class VllmCohereLayerNorm(CohereLayerNorm):
    """LayerNorm of Command R, without bias: (hidden_states [..., H], residuals), of which only the first changes."""


class VllmNemotronLayerNorm1P(nn.Module):
    """NemotronLayerNorm1P from 0.32 on: x [..., H] times 1 + weight [H]; with a residual, (out, x + residual)."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (hidden_size,), eps
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = x if residual is None else x + residual
        out = layer_norm(x, one_more(self.weight), self.bias, self.eps)
        return out if residual is None else (out, x)


class VllmNemotronLayerNorm1P_0_26(nn.LayerNorm):
    """NemotronLayerNorm1P before 0.32; see VllmNemotronLayerNorm1P."""

    supports = staticmethod(unsupported_shape)

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x, residual=None):
        x = x if residual is None else x + residual
        out = layer_norm(x, one_more(self.weight), self.bias, self.eps)
        return out if residual is None else (out, x)


class VllmRMSNormGated(GatedRMSNorm):
    """RMSNormGated: x, z [..., hidden_size]; the norm of x act(z), or with norm_before_gate the norm times act(z)."""


class VllmFusedRMSNormGated(FusedGatedRMSNorm):
    """FusedRMSNormGated of flash-linear-attention: x, g [..., hidden_size]; the norm times act(g)."""


class VllmMixer2RMSNormGated(MixerRMSNormGated):
    """Mixer2RMSNormGated of Mamba 2: x, gate [..., full_hidden_size]; the norm of x silu(gate), in groups."""


def vllm_l2norm_fwd(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """flash-linear-attention's l2norm_fwd: x [..., D] to the same, in output_dtype or x's dtype."""
    return l2_norm(x, eps, output_dtype)


_HOST = "vllm.model_executor.layers.layernorm:"
_MODELS = "vllm.model_executor.models."
_FUSERS = _MODELS + "transformers.fusers.rms_norm:"
_UNMEASURED = "on request: not measured yet against the host's Triton kernel on a GPU"
_L2_NOTE = "vLLM's linear attention binds the function at import: for forks and for our engine"

TARGETS = {
    "rms_norm": (
        Target("vllm", _HOST + "RMSNorm", "VllmRMSNorm", "leaf", writes=("x",)),
        Target("vllm", _FUSERS + "TPAwareRMSNorm", "VllmTPAwareRMSNorm", "leaf", writes=("x",)),
        Target("vllm", _MODELS + "commandr:RMSNorm", "VllmCohereRMSNorm", "leaf", ">=0.32"),
        Target("vllm", _MODELS + "cohere2_moe:RMSNorm", "VllmCohereRMSNorm", "leaf", "<0.33"),
    ),
    "gemma_rms_norm": (
        Target("vllm", _HOST + "GemmaRMSNorm", "VllmGemmaRMSNorm", "leaf"),
        Target("vllm", _FUSERS + "TPAwareGemmaRMSNorm", "VllmTPAwareGemmaRMSNorm", "leaf"),
    ),
    "layer_norm": (
        Target("vllm", _HOST + "LayerNorm", "VllmLayerNorm_0_26", "leaf", "<0.32"),
        Target("vllm", _HOST + "LayerNorm", "VllmLayerNorm", "leaf", ">=0.32"),
        Target("vllm", _MODELS + "commandr:LayerNorm", "VllmCohereLayerNorm", "leaf"),
        Target(
            "vllm", _MODELS + "nemotron:NemotronLayerNorm1P", "VllmNemotronLayerNorm1P_0_26", "leaf", "<0.32",
        ),
        Target(
            "vllm", _MODELS + "nemotron:NemotronLayerNorm1P", "VllmNemotronLayerNorm1P", "leaf", ">=0.32",
        ),
    ),
    "rms_norm_gated": (
        Target("vllm", _HOST + "RMSNormGated", "VllmRMSNormGated", "leaf", "", False, _UNMEASURED),
        Target(
            "vllm", "vllm.model_executor.layers.mamba.mamba_mixer2:Mixer2RMSNormGated", "VllmMixer2RMSNormGated",
            "leaf", "", False, _UNMEASURED, {"norm_before_gate": False},
        ),
        Target(
            "vllm", "vllm.third_party.flash_linear_attention.ops.kda:FusedRMSNormGated", "VllmFusedRMSNormGated",
            "leaf", "", False, _UNMEASURED,
        ),
    ),
    "l2_norm": (
        Target(
            "vllm", "vllm.third_party.flash_linear_attention.ops.l2norm:l2norm_fwd", "vllm_l2norm_fwd", "function",
            note=_L2_NOTE,
        ),
    ),
}  # fmt: skip
