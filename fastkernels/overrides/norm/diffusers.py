"""Drop-in normalizations for diffusers (diffusers.models.normalization)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.rows import tokens_first
from fastkernels.overrides.norm.layer_norm import layer_norm, unsupported_shape
from fastkernels.overrides.norm.rms_norm import rms_norm


def _unsupported(module: Any) -> str | None:
    """Why our forward does not support this RMS norm (ours or the host's), or None."""
    if len(module.dim) != 1:
        return f"it has a weight for the last {len(module.dim)} dimensions, not one"
    return "it has a bias" if getattr(module, "bias", None) is not None else None


class DiffusersRMSNorm(nn.Module):
    """diffusers' RMSNorm: hidden_states [..., dim], rounded to the weight's dtype before the product with it."""

    supports = staticmethod(_unsupported)

    def __init__(self, dim: Any, eps: float, elementwise_affine: bool = True, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.dim = torch.Size((dim,) if isinstance(dim, int) else dim)
        self.weight = nn.Parameter(torch.ones(self.dim)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(self.dim)) if elementwise_affine and bias else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = tokens_first(hidden_states)
        x, weight = hidden_states.transpose(1, 2) if heads else hidden_states, self.weight
        if weight is None or weight.dtype == x.dtype:
            out = rms_norm(x, weight, self.eps, None, None, True)
        elif weight.dtype in (torch.float16, torch.bfloat16):
            out = rms_norm(x, None, self.eps).to(weight.dtype) * weight
        else:
            out = rms_norm(x.to(weight.dtype), weight, self.eps, None, None, False)
        return out.transpose(1, 2) if heads else out


class DiffusersMochiRMSNorm(nn.Module):
    """diffusers' MochiRMSNorm: hidden_states [..., dim], rounded once, after the product with the weight."""

    supports = staticmethod(_unsupported)

    def __init__(self, dim: Any, eps: float, elementwise_affine: bool = True):
        super().__init__()
        self.eps = eps
        self.dim = torch.Size((dim,) if isinstance(dim, int) else dim)
        self.weight = nn.Parameter(torch.ones(self.dim)) if elementwise_affine else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if tokens_first(hidden_states):
            out = rms_norm(hidden_states.transpose(1, 2), self.weight, self.eps, None, None, False)
            return out.transpose(1, 2)
        return rms_norm(hidden_states, self.weight, self.eps, None, None, False)


class DiffusersFP32LayerNorm(nn.LayerNorm):
    """diffusers' FP32LayerNorm: inputs [..., H], computed in float32, returned in their dtype."""

    supports = staticmethod(unsupported_shape)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return layer_norm(inputs, self.weight, self.bias, self.eps)


def _target(name: str) -> Target:
    return Target("diffusers", f"diffusers.models.normalization:{name}", f"Diffusers{name}", "leaf")


TARGETS = {
    "rms_norm": (_target("RMSNorm"), _target("MochiRMSNorm")),
    "layer_norm": (_target("FP32LayerNorm"),),
}
