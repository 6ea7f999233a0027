"""Parts of host modules: whether other code runs around one, and products that save a concatenation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.kit import cublaslt


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


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    if cublaslt.unsupported(rows, weight, bias, added) is None:
        return cublaslt.product(rows, weight, bias, added).view(*x.shape[:-1], -1)
    y = nn.functional.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


_linear_product = functional(
    "linear_product(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None) -> Tensor",
    _product,
    lambda x, weight, bias=None, residual=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


def product(linear: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """linear(x), or residual + linear(x), which is one kernel if the layer is a plain one."""
    others = () if residual is None else (residual,)
    if not plain_linear(linear, x, *others) or (residual is not None and residual.shape[:-1] != x.shape[:-1]):
        return linear(x) if residual is None else residual + linear(x)
    return _linear_product(x, linear.weight, linear.bias, residual)


def mlp(ff: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """ff(x), or residual + ff(x); ff: an MLP as diffusers writes it, modules in a row named `net`."""
    if changed(ff) or not type(ff).__name__.endswith("FeedForward"):
        y = ff(x)
        return y if residual is None else residual + y
    *first, last = (m for m in ff.net if type(m) is not nn.Dropout or m.training or changed(m))
    for module in first:
        x = module(x)
    return product(last, x, residual)


def _of_two(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    first, second = weight.split((a.shape[-1], b.shape[-1]), dim=1)
    x, y = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if cublaslt.unsupported(x, first, bias) is cublaslt.unsupported(y, second) is None:
        out = cublaslt.product(x, first, bias)
        return cublaslt.product(y, second, residual=out, out=out).view(*a.shape[:-1], -1)
    out = nn.functional.linear(a, first, bias)
    out.view(-1, out.shape[-1]).addmm_(y, second.t())
    return out


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
            if cublaslt.unsupported(x, weight, bias, into) is None:
                cublaslt.product(x, weight, bias, out=into)
            elif bias is None:
                torch.mm(x, weight.t(), out=into)
            else:
                torch.addmm(bias, x, weight.t(), out=into)
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
