"""Drop-in activations for diffusers (diffusers.models.activations): a linear layer, and the activation after it."""

from __future__ import annotations

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu import gelu
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.linear.linear_gelu import fuses, linear_gelu


class DiffusersGELU(nn.Module):
    """diffusers' GELU: hidden_states [..., dim_in] to [..., dim_out]; approximate: 'none' (erf) or 'tanh'.

    With tanh, the GELU is the epilogue of the product. A patch without a list of ops leaves others to a compiler.
    """

    def __init__(self, dim_in: int, dim_out: int, approximate: str = "none", bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)
        self.approximate = approximate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.approximate == "tanh" and fuses(self.proj, hidden_states):
            return linear_gelu(hidden_states, self.proj.weight, self.proj.bias, "tanh")
        x = self.proj(hidden_states)
        if torch.compiler.is_compiling() and getattr(type(self), "fastkernels_tried", False):
            return nn.functional.gelu(x, approximate=self.approximate)
        return gelu(x, self.approximate)


class DiffusersApproximateGELU(nn.Module):
    """diffusers' ApproximateGELU: x [..., dim_in] to [..., dim_out]."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quick_gelu(self.proj(x))


_HOST = "diffusers.models.activations:"

TARGETS = {
    # FLUX.1, compiled: the GELU is a kernel of its own, 70 us of 4,096 tokens
    "gelu": (Target("diffusers", _HOST + "GELU", "DiffusersGELU", "module", compiled=True),),
    "quick_gelu": (Target("diffusers", _HOST + "ApproximateGELU", "DiffusersApproximateGELU", "module"),),
}
