"""Drop-in normalizations for flash-linear-attention (fla.modules)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.rms_norm_gated import rms_norm_gated


class _Norm(nn.Module):
    """weight [hidden_size], and bias [hidden_size] if requested; None without elementwise_affine."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        made = torch.ones(hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(made) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros_like(made)) if elementwise_affine and bias else None


class FlaRMSNorm(_Norm):
    """RMSNorm: x [..., hidden_size] to the same, in x's dtype; with prenorm also the sum of x and residual.

    The sum has the residual's dtype, or float32 with residual_in_fp32; it is new memory.
    """

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return "it has a bias" if module.bias is not None else None

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        if residual is None:
            out, total = rms_norm(x, self.weight, self.eps, None, None, False), x
            total = x.float() if residual_in_fp32 else x
        else:
            total = residual.to(torch.float32 if residual_in_fp32 else residual.dtype, copy=True)
            out = rms_norm(x, self.weight, self.eps, total, None, False)
        return (out, total) if prenorm else out


class FlaLayerNorm(_Norm):
    """LayerNorm: x [..., hidden_size] to the same, in x's dtype; with prenorm also the sum of x and residual."""

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        total = _sum(x, residual, residual_in_fp32)
        out = layer_norm(total, self.weight, self.bias, self.eps).to(x.dtype)
        return (out, total) if prenorm else out


class FlaFusedRMSNormGated(nn.Module):
    """FusedRMSNormGated: x, g [..., hidden_size]; the norm of x (plus residual) times act(g), in x's dtype."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid', got {activation!r}")
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.activation = activation
        made = torch.ones(hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(made) if elementwise_affine else None
        self.register_parameter("bias", None)

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        total = _sum(x, residual, residual_in_fp32)
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        given: Any = (total, self.weight, g, self.eps, None, True, activation)
        out = rms_norm_gated(*given).to(x.dtype)
        return (out, total) if prenorm else out


def _sum(x: torch.Tensor, residual: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """x plus residual, in the residual's dtype or float32."""
    if residual is None:
        return x.float() if wide else x
    return (x.float() + residual.float()).to(torch.float32 if wide else residual.dtype)


def _targets(name: str, cls: str, old: str, new: str, **more: Any) -> tuple[Target, ...]:
    """One for the module of 0.5, one for that of 0.6."""
    return (
        Target("fla", f"fla.modules.{old}:{name}", cls, "leaf", "<0.6", **more),
        Target("fla", f"fla.modules.norm.{new}:{name}", cls, "leaf", ">=0.6", **more),
    )


TARGETS = {
    # The op writes the sum into residual, FLA's class returns it.
    "rms_norm": _targets("RMSNorm", "FlaRMSNorm", "layernorm", "layernorm", computes={"residual": None}),
    "layer_norm": _targets("LayerNorm", "FlaLayerNorm", "layernorm", "layernorm"),
    "rms_norm_gated": _targets(
        "FusedRMSNormGated", "FlaFusedRMSNormGated", "fused_norm_gate", "fused_norm_gate"
    ),
}
