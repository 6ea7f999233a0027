"""MLPs of diffusers; compiled, a GEGLU or a gated residual is on Hopper in the kernel of its product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.block.linear_residual import adds, linear_residual
from fastkernels.overrides.kit.modules import changed, compute_products, plain_linear, product
from fastkernels.overrides.linear.tiled_linear_cuda import GEGLU, linears_tiled, runs_tiled, supports_tiled


def _linear_geglu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    (up, gate), (of_up, of_gate) = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
    if x.is_cuda and all(supports_tiled(x, *each) is None for each in ((up, of_up), (gate, of_gate))):
        return linears_tiled(x, (gate, up), (of_gate, of_up), GEGLU)
    values, gate = compute_products(x, [weight], [bias])[0].chunk(2, dim=-1)
    return values * nn.functional.gelu(gate)


_geglu = functional(
    "linear_geglu(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _linear_geglu,
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)),
)


def _geglu_of(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """values * gelu(gate), the halves of linear(x)."""
    if plain_linear(linear, x) and runs_tiled(linear, x, halves=True):
        return _geglu(x, linear.weight, linear.bias)
    values, gate = product(linear, x).chunk(2, dim=-1)
    return values * nn.functional.gelu(gate)


def mlp(ff: Any, x: torch.Tensor) -> torch.Tensor:
    """ff(x), an MLP of diffusers: modules in a row, `net`."""
    last, x = _but_last(ff, x)
    return product(last, x) if type(last) is nn.Linear else last(x)


def mlp_into_residual(
    gated: Callable[..., Any], ff: Any, x: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """gated(residual, ff(x), gate)[0], which is residual + gate * ff(x); gate: [B, N].

    Of one image, whose gate is one scale for each channel, the residual is added in the kernel of the last product.
    """
    last, x = _but_last(ff, x)
    if type(last) is not nn.Linear:
        return gated(residual, last(x), gate)[0]
    alike = len(x) == 1 and x.dtype == residual.dtype == gate.dtype
    if torch.compiler.is_compiling() and alike and adds(last, x, gate):
        return linear_residual(residual, x, last.weight, last.bias, gate[0])
    return gated(residual, product(last, x), gate)[0]


def _but_last(ff: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """An MLP's last module and what that reads; the MLP itself and x if its own code has to run."""
    if changed(ff) or not type(ff).__name__.endswith("FeedForward"):
        return ff, x
    *before, last = ff.net
    for module in before:
        cls = type(module)
        left = getattr(cls, "fastkernels_tried", not hasattr(cls, "fastkernels"))  # to a compiler
        if cls is nn.Linear:
            x = product(module, x)
        elif cls.__name__ == "GEGLU" and left and torch.compiler.is_compiling() and not changed(module):
            x = _geglu_of(module.proj, x)
        else:
            x = module(x)
    return last, x
