"""A linear layer into a gated residual, residual + gate * (x W^T + b): on Hopper in the kernel of the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkernels.core.dispatch import functional
from fastkernels.overrides.diffusion.feed_forward import mlp_but_last
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.kit.modules import (
    FEW,
    compute_of_two,
    compute_products,
    linear_of_two,
    plain_linear,
    product,
)
from fastkernels.overrides.linear.tiled_linear_cuda import (
    PIECE,
    RESIDUAL,
    linear_tiled,
    runs_tiled,
    supports_tiled,
)

LEAST = 1024  # tokens of an image


def _gated_product(
    x: torch.Tensor, second: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor, front: torch.Tensor | None, gate: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out = _like(x, second, weight)
    inputs = [x] if second is None else [x, second]
    aligned = all(t is None or not t.data_ptr() % 16 for t in (front, residual, gate))
    if not (x.is_cuda and aligned and all(supports_tiled(t, weight, bias) is None for t in inputs)):
        if second is None:
            found = compute_products(x, [weight], [bias])[0]
        else:
            found = compute_of_two(x, second, weight, bias)
        return gated_residual(residual, found, gate, *(None,) * 4, 1e-6, front)[0]
    for i in range(len(x)):
        of_image = residual[i] if front is None else _whole(front[i], residual[i])
        rest = None if second is None else second[i]
        linear_tiled(x[i], weight, bias, RESIDUAL, gate[i], of_image, rest, out[i])
    return out


def _whole(front: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """torch.cat((front, residual)), which most blocks return as two views of one tensor."""
    alone = front.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
    behind = front.data_ptr() + front.numel() * front.element_size() == residual.data_ptr()
    if alone or not (behind and front.is_contiguous() and residual.is_contiguous()):
        return torch.cat((front, residual))
    return front.as_strided((len(front) + len(residual), front.shape[1]), front.stride())


def _like(x: torch.Tensor, second: Any, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_op = functional(
    "linear_gated_residual(Tensor x, Tensor? second, Tensor weight, Tensor? bias, Tensor residual, Tensor? front,"
    " Tensor gate) -> Tensor",
    _gated_product,
    _like,
)


def into_residual(
    gated: Callable[..., Any], layer: Any, inputs: tuple[torch.Tensor, ...], residual: torch.Tensor, gate: torch.Tensor,
    front: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """gated(residual, layer(torch.cat(inputs, -1)), gate, front=front)[0]: residual + gate * layer(..).

    layer   a linear layer, whose product then runs in one kernel with the residual for each image, or an MLP
    inputs  one or two tensors [B, T, ..]
    front   tokens of the residual before those in `residual`, or None; gate: [B, N]
    """
    if len(inputs) == 1:
        layer, x = mlp_but_last(layer, inputs[0])
        inputs = (x,)
    if _suits(layer, inputs, residual, gate):
        second = inputs[1] if len(inputs) > 1 else None
        return _op(inputs[0], second, layer.weight, layer.bias, residual, front, gate)
    if len(inputs) > 1:
        x = linear_of_two(layer, *inputs)
    else:
        x = product(layer, *inputs) if type(layer) is torch.nn.Linear else layer(*inputs)
    return gated(residual, x, gate, front=front)[0]


def _suits(layer: Any, inputs: tuple[torch.Tensor, ...], residual: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether the kernel runs: few images of many tokens, a plain layer, and no result of a wider dtype."""
    if not plain_linear(layer, *inputs) or any(t.dim() != 3 for t in inputs):
        return False
    (batch, tokens, k), others = inputs[0].shape, (*inputs[1:], residual, gate)
    alike = all(t.dtype == inputs[0].dtype and len(t) == batch for t in others)
    whole = len(inputs) == 1 or k % PIECE == 0
    return alike and whole and batch <= FEW and tokens >= LEAST and runs_tiled(layer, inputs[0])
