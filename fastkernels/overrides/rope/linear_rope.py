"""Queries, keys and values of one x, the first two rotated as in rope_nd: on Hopper in the kernel of their products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.core.dispatch import functional
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    HEAD,
    ROTATED_HALVES,
    ROTATED_NEIGHBORS,
    linears_tiled,
    runs_tiled,
    supports_tiled,
)
from fastkernels.overrides.linear.modules import compute_products, plain_linear
from fastkernels.overrides.rope.rope_nd import rope_nd

LONGEST = 2048  # columns of x for which it was faster than products and a rotation


def _linear_rope(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], cos: torch.Tensor,
    sin: torch.Tensor, halves: bool,
) -> torch.Tensor:  # fmt: skip
    products = zip(weights, biases, strict=True)
    aligned = (
        all(not (t.data_ptr() % 16 or t.stride(0) % 8) for t in (cos, sin)) and cos.stride() == sin.stride()
    )
    if x.is_cuda and aligned and all(supports_tiled(x, *each) is None for each in products):
        f = ROTATED_HALVES if halves else ROTATED_NEIGHBORS
        return linears_tiled(x, weights, biases, f, cos, sin)
    found = compute_products(x, weights, biases)
    if len(weights) == 1:
        turned = found[0].unflatten(-1, (3, -1, HEAD))[:, :, :2].flatten(2, 3)
    else:
        turned = found[:2].flatten(0, 1).unflatten(-1, (-1, HEAD))
    turned.copy_(rope_nd(turned, cos, sin, halves))
    return found


_rotated = functional(
    "linear_rope(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor cos, Tensor sin, bool halves) -> Tensor",
    _linear_rope,
    lambda x, weights, *_: x.new_empty((len(weights), *x.shape[:-1], weights[0].shape[0])),
)


def rotated_products(
    linears: Sequence[Any], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool
) -> torch.Tensor | None:
    """The results of one layer of queries, keys and values, or of three: [layers, B, S, N]. None if not in one kernel.

    x: [B, S, K]; cos, sin: [P, HEAD] of the last P tokens, for all heads of queries and keys.
    """
    n = linears[0].out_features
    whole = (
        n % (3 * HEAD if len(linears) == 1 else HEAD) == 0 and cos.shape[1] == HEAD and cos.dtype == x.dtype
    )
    if (
        not whole
        or x.dim() != 3
        or x.shape[-1] > LONGEST
        or any(layer.out_features != n for layer in linears)
    ):
        return None
    if not all(plain_linear(layer, x) and runs_tiled(layer, x) for layer in linears):
        return None
    weights, biases = [layer.weight for layer in linears], [layer.bias for layer in linears]
    return _rotated(x, weights, biases, cos, sin, halves)
