"""A linear layer into a gated residual, residual + gate * (x W^T + b): on Hopper in the kernel of the product."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.dispatch import functional
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.kit.modules import FEW, compute_of_two, compute_products, plain_linear
from fastkernels.overrides.linear.tiled_linear_cuda import PIECE, RESIDUAL, linear_tiled, runs_tiled, supports_tiled

LEAST = 1024  # tokens of an image


def _gated_product(
    x: torch.Tensor, second: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor, front: torch.Tensor | None, gate: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out = _like(x, second, weight)
    others = [t for t in (second, front, residual, gate) if t is not None]
    alike = all(t.dtype == x.dtype and not t.data_ptr() % 16 for t in others)
    if not (x.is_cuda and alike and supports_tiled(x, weight, bias) is None):
        product = compute_products(x, [weight], [bias])[0] if second is None else compute_of_two(x, second, weight, bias)
        return gated_residual(residual, product, gate, *(None,) * 4, 1e-6, front)[0]
    for i in range(len(x)):
        of_image = residual[i] if front is None else _whole(front[i], residual[i])
        rest = None if second is None else second[i]
        linear_tiled(x[i], weight, bias, RESIDUAL, gate[i], of_image, rest, out[i])
    return out


def _whole(front: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """torch.cat((front, residual)), which most blocks return as two views of one tensor."""
    follows = front.data_ptr() + front.numel() * front.element_size() == residual.data_ptr()
    if follows and front.is_contiguous() and residual.is_contiguous():
        if front.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr():
            return front.as_strided((len(front) + len(residual), front.shape[1]), front.stride())
    return torch.cat((front, residual))


def _like(x: torch.Tensor, second: Any, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_op = functional(
    "linear_gated_residual(Tensor x, Tensor? second, Tensor weight, Tensor? bias, Tensor residual, Tensor? front,"
    " Tensor gate) -> Tensor",
    _gated_product,
    _like,
)


def gated_product(
    linear: Any, inputs: tuple[torch.Tensor, ...], residual: torch.Tensor, gate: torch.Tensor,
    front: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """residual + gate * linear(torch.cat(inputs, -1)) of [B, T, K] in one kernel an image; None where that is not faster.

    front: tokens of the residual before those in `residual`, or None. gate: [B, N].
    """
    x, *rest = inputs
    shapes = [t.shape[0] for t in (gate, residual)]
    suits = x.dim() == 3 and len(x) <= FEW and x.shape[1] >= LEAST and len(rest) < 2 and shapes == [len(x)] * 2
    if not suits or (rest and x.shape[-1] % PIECE) or any(t.dtype != x.dtype for t in (*rest, gate, residual)):
        return None
    if not plain_linear(linear, *inputs) or not runs_tiled(linear, x):
        return None
    return _op(x, *(rest or (None,)), linear.weight, linear.bias, residual, front, gate)
