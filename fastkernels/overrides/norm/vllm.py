"""Drop-in normalizations for vLLM (vllm.model_executor.layers.layernorm)."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.l2_norm import l2_norm
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm import rms_norm


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
        eager = not torch.compiler.is_compiling()
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


def vllm_l2norm_fwd(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """flash-linear-attention's l2norm_fwd: x [..., D] to the same, in output_dtype or x's dtype."""
    return l2_norm(x, eps, output_dtype)


_HOST = "vllm.model_executor.layers.layernorm:"
_L2_NOTE = "vLLM's linear attention binds the function at import: for forks and for our engine"

TARGETS = {
    "rms_norm": (Target("vllm", _HOST + "RMSNorm", "VllmRMSNorm", "leaf"),),
    "gemma_rms_norm": (Target("vllm", _HOST + "GemmaRMSNorm", "VllmGemmaRMSNorm", "leaf"),),
    "layer_norm": (
        Target("vllm", _HOST + "LayerNorm", "VllmLayerNorm_0_26", "leaf", "<0.32"),
        Target("vllm", _HOST + "LayerNorm", "VllmLayerNorm", "leaf", ">=0.32"),
    ),
    "l2_norm": (
        Target(
            "vllm", "vllm.third_party.flash_linear_attention.ops.l2norm:l2norm_fwd", "vllm_l2norm_fwd", "function",
            note=_L2_NOTE,
        ),
    ),
}  # fmt: skip
