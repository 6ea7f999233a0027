"""SiLU(gate(x)) * up(x) of linear layers: on Hopper one kernel, whose tiles have rows of both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.block.two_linears import side_by_side
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    SWIGLU,
    linears_tiled,
    runs_tiled,
    supports_tiled,
)
from fastkernels.overrides.linear.modules import plain_linear


def _linear_swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    given = ((gate, gate_bias), (up, up_bias))
    if x.is_cuda and all(supports_tiled(x, *each) is None for each in given):
        return linears_tiled(x, (gate, up), (gate_bias, up_bias), SWIGLU)
    first, second = (F.linear(x, *each) for each in given)
    return F.silu(first) * second


_swiglu = functional(
    "linear_swiglu(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias) -> Tensor",
    _linear_swiglu,
    lambda x, gate, *_: x.new_empty((*x.shape[:-1], gate.shape[0])),
)


def fuses_swiglu(x: torch.Tensor, *linears: nn.Linear) -> bool:
    """Whether one kernel computes SiLU(gate(x)) * up(x) of plain layers, or of one that has both: many tokens."""
    alike = len({linear.weight.shape for linear in linears}) == 1
    return alike and all(
        plain_linear(linear, x) and runs_tiled(linear, x, len(linears) == 1) for linear in linears
    )


def swiglu(x: torch.Tensor, *linears: nn.Linear) -> torch.Tensor:
    """Return SiLU(gate(x)) * up(x). linears: gate and up; or one layer whose halves they are."""
    if fuses_swiglu(x, *linears):
        if len(linears) == 2:
            return _swiglu(x, *(layer.weight for layer in linears), *(layer.bias for layer in linears))
        weight, bias = linears[0].weight, linears[0].bias
        return _swiglu(x, *weight.chunk(2), *((None, None) if bias is None else bias.chunk(2)))
    return silu_and_mul(linears[0](x) if len(linears) == 1 else side_by_side(x, *linears))
