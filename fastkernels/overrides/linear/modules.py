"""Parts of host modules: whether other code runs around one, and products that save a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.kit import cublaslt
from fastkernels.overrides.linear.kernels.tiled_linear_cuda import (
    GEGLU,
    is_faster,
    linears_tiled,
    runs_tiled,
    supports_tiled,
)


def changed(module: Any) -> bool:
    """Whether other code, such as that of CPU offload, has to run around a part of ours."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def autocasts(x: torch.Tensor) -> bool:
    """Whether autocast chooses dtypes of operations on x; meta tensors have none."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def plain_linear(linear: Any, *inputs: torch.Tensor) -> bool:
    """Whether a layer's own code is a product with its weight, all in one dtype.

    Adapters, quantized and offloaded weights, hooks and autocast need the layer's own code.
    """
    plain = type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not changed(linear)
    return plain and all(x.dtype == linear.weight.dtype and not autocasts(x) for x in inputs)


def _into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Write x W^T + b to out; all are matrices."""
    if cublaslt.multiply(x, weight, bias, out):
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def compute_products(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> torch.Tensor:  # fmt: skip
    """Products of x [..., K] with weights of one shape [N, K], each with a bias [N] or None, as [weights, ..., N]."""
    rows, n = x.reshape(-1, x.shape[-1]), weights[0].shape[0]
    given = [bias for bias in biases if bias is not None]
    spans = [(i, i + 1) for i in range(len(weights))]
    if len(given) in (0, len(weights)):
        spans = cublaslt.batches(rows, weights, given)
    one_batch = len(spans) == 1 < len(weights)  # as fast as the tiled kernel
    if not one_batch and is_faster(x, weights, biases):
        return linears_tiled(x, weights, biases)
    out = x.new_empty((len(weights), len(rows), n))
    for first, last in spans:
        span = slice(first, last)
        if last - first > 1 and cublaslt.products(rows, weights[span], given[span], out[span]):
            continue
        for i in range(first, last):
            _into(out[i], rows, weights[i], biases[i])
    return out.view(len(weights), *x.shape[:-1], n)


_linear_products = functional(
    "linear_products(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor",
    compute_products,
    lambda x, weights, biases: x.new_empty((len(weights), *x.shape[:-1], weights[0].shape[0])),
)


def products(linears: Sequence[Any], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The results of layers of one x; of plain layers of one size in one kernel, where their weights allow it.

    Small products leave half of a GPU idle: queries, keys and values, or keys and values of a text.
    """
    found = stacked_products(linears, x)
    return [layer(x) for layer in linears] if found is None else found.unbind()


def stacked_products(linears: Sequence[Any], x: torch.Tensor) -> torch.Tensor | None:
    """The results of `products` in one tensor [layers, ..., N], if the layers are plain ones of one size."""
    plain = all(plain_linear(layer, x) for layer in linears)
    if not plain or len({layer.weight.shape for layer in linears}) > 1:
        return None
    return _linear_products(x, [layer.weight for layer in linears], [layer.bias for layer in linears])


def product(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """linear(x)."""
    return products((linear,), x)[0]


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
    """values * gelu(gate), the halves of linear(x): one kernel of a plain layer and many tokens."""
    if plain_linear(linear, x) and runs_tiled(linear, x, halves=True):
        return _geglu(x, linear.weight, linear.bias)
    values, gate = product(linear, x).chunk(2, dim=-1)
    return values * nn.functional.gelu(gate)


def mlp(ff: Any, x: torch.Tensor) -> torch.Tensor:
    """ff(x), an MLP of diffusers: modules in a row, `net`. Compiled, a GEGLU and its product are ours, too."""
    if changed(ff) or not type(ff).__name__.endswith("FeedForward"):
        return ff(x)
    for module in ff.net:
        cls = type(module)
        left = getattr(cls, "fastkernels_tried", not hasattr(cls, "fastkernels"))  # to a compiler
        if cls is nn.Linear:
            x = product(module, x)
        elif cls.__name__ == "GEGLU" and left and torch.compiler.is_compiling() and not changed(module):
            x = _geglu_of(module.proj, x)
        else:
            x = module(x)
    return x


def _of_two(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    first, second = weight.split((a.shape[-1], b.shape[-1]), dim=1)
    x, y = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    out = a.new_empty((len(x), len(weight)))
    _into(out, x, first, bias)
    if not cublaslt.multiply(y, second, None, out, out):
        out.addmm_(y, second.t())
    return out.view(*a.shape[:-1], -1)


# One op, since a compiler would copy the first product before it adds the second.
_linear_of_two = functional(
    "linear_of_two(Tensor a, Tensor b, Tensor weight, Tensor? bias=None) -> Tensor",
    _of_two,
    lambda a, b, weight, bias=None: a.new_empty((*a.shape[:-1], weight.shape[0])),
)


def linear_of_two(linear: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """linear(torch.cat((a, b), -1)), as two products without the concatenation if the layer is a plain one."""
    if not plain_linear(linear, a, b):
        return linear(torch.cat((a, b), dim=-1))
    return _linear_of_two(a, b, linear.weight, linear.bias)


def _side_by_side(
    a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor, bias_a: torch.Tensor | None,
    bias_b: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    out = _side_by_side_like(a, b, of_a)
    for i in range(len(out)):
        for x, into, weight, bias in (
            (a[i], out[i, : a.shape[1]], of_a, bias_a), (b[i], out[i, a.shape[1] :], of_b, bias_b),
        ):  # fmt: skip
            _into(into, x, weight, bias)
    return out


def _side_by_side_like(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((len(a), a.shape[1] + b.shape[1], of_a.shape[0]))


_joined_linears = functional(
    "joined_linears(Tensor a, Tensor b, Tensor of_a, Tensor of_b, Tensor? bias_a, Tensor? bias_b) -> Tensor",
    _side_by_side,
    _side_by_side_like,
)
FEW = 4  # images, for each of which there is a product


def joined_linears(of_a: Any, a: torch.Tensor, of_b: Any, b: torch.Tensor) -> torch.Tensor:
    """torch.cat((of_a(a), of_b(b)), 1) of tokens [B, T, C]; products of plain layers are written into one tensor."""
    if len(a) > FEW or not (plain_linear(of_a, a) and plain_linear(of_b, b, a)):
        return torch.cat((of_a(a), of_b(b)), dim=1)
    return _joined_linears(a, b, of_a.weight, of_b.weight, of_a.bias, of_b.bias)
