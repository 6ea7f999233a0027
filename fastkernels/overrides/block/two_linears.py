"""Gate and up projection of hosts that have them as two torch.nn.Linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit.modules import changed, plain_linear
from fastkernels.overrides.linear.tiled_linear_cuda import SWIGLU, linears_tiled, runs_tiled, supports_tiled


def not_linear(module: nn.Module, *names: str) -> str | None:
    """Why these parts of a module are not plain linear layers, or None."""
    for name in names:
        child = getattr(module, name, None)
        if type(child) is not nn.Linear:
            return f"{name} is {type(child).__name__}, not nn.Linear"
        if changed(child):
            return f"{name} has hooks or a replaced forward"
    return None


def not_silu(module: nn.Module, name: str) -> str | None:
    """Why this part of a module is not SiLU, or None."""
    part = getattr(module, name, None)
    act = type(part).__name__
    if act not in ("SiLU", "SiLUActivation"):
        return f"{name} is {act}, not SiLU"
    return f"{name} has hooks or a replaced forward" if changed(part) else None


def _linear_swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    given = ((gate, gate_bias), (up, up_bias))
    if x.is_cuda and all(supports_tiled(x, *each) is None for each in given):
        return linears_tiled(x, (gate, up), (gate_bias, up_bias), SWIGLU)
    first, second = (F.linear(x, *each) for each in given)
    return F.silu(first) * second


# One kernel on Hopper: a gate's rows and those of `up` are halves of its tiles.
_swiglu = functional(
    "linear_swiglu(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias) -> Tensor",
    _linear_swiglu,
    lambda x, gate, *_: x.new_empty((*x.shape[:-1], gate.shape[0])),
)


def fuses_swiglu(x: torch.Tensor, *linears: nn.Linear) -> bool:
    """Whether one kernel computes SiLU(gate(x)) * up(x) of plain layers, or of one that has both: many tokens."""
    return all(plain_linear(linear, x) and runs_tiled(linear, x, len(linears) == 1) for linear in linears)


def swiglu(x: torch.Tensor, *linears: nn.Linear) -> torch.Tensor:
    """Return SiLU(gate(x)) * up(x). linears: gate and up; or one layer whose halves they are."""
    if fuses_swiglu(x, *linears):
        weights, biases = [layer.weight for layer in linears], [layer.bias for layer in linears]
        if len(linears) == 1:
            weights, biases = weights[0].chunk(2), (None, None) if biases[0] is None else biases[0].chunk(2)
        return _swiglu(x, *weights, *biases)
    return silu_and_mul(linears[0](x) if len(linears) == 1 else side_by_side(x, *linears))


def side_by_side(x: torch.Tensor, gate: nn.Linear, up: nn.Linear) -> torch.Tensor:
    """Return gate(x) and up(x), concatenated along the last dimension."""
    eager = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    plain = plain_linear(gate, x) and plain_linear(up, x) and gate.bias is None and up.bias is None
    if not eager or not plain:
        return torch.cat((gate(x), up(x)), dim=-1)
    # Write the products into the halves of one tensor: a concatenation would cost what the fused activation saves.
    # Dynamo cannot trace this, and a compiler avoids the copies of a concatenation itself.
    out = torch.empty((*x.shape[:-1], gate.out_features + up.out_features), dtype=x.dtype, device=x.device)
    rows, halves = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]).split(gate.out_features, dim=-1)
    torch.mm(rows, gate.weight.t(), out=halves[0])
    torch.mm(rows, up.weight.t(), out=halves[1])
    return out
