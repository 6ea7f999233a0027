"""Parts of host modules: whether other code runs around one, and products together or without a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.kit.streams import at_once


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


def _of_two(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    first, second = weight.split((a.shape[-1], b.shape[-1]), dim=1)
    out = nn.functional.linear(a, first, bias)
    out.view(-1, out.shape[-1]).addmm_(b.reshape(-1, b.shape[-1]), second.t())
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


def _write(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    x, out = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _products(
    xs: list[torch.Tensor], weights: list[torch.Tensor], biases: list[torch.Tensor | None], joined: bool
) -> list[torch.Tensor]:
    found = _products_like(xs, weights, biases, joined)
    outs: list[tuple[torch.Tensor, ...]] = [(out,) for out in found]
    ins: list[tuple[torch.Tensor, ...]] = [(x,) for x in xs]
    if joined:  # a product for each image: the rows of one image alone are in one piece of memory
        ins[-2:] = xs[-2].unbind(), xs[-1].unbind()
        outs[-1:] = [out.unbind() for out in found[-1].split((xs[-2].shape[1], xs[-1].shape[1]), dim=1)]
    work = [
        (x.numel() * len(weight), partial(_write, x, weight, bias, out))
        for x_parts, weight, bias, out_parts in zip(ins, weights, biases, outs, strict=True)
        for x, out in zip(x_parts, out_parts, strict=True)
    ]
    at_once(work, xs[0].device)
    return found


def _products_like(
    xs: list[torch.Tensor], weights: list[torch.Tensor], biases: list[torch.Tensor | None], joined: bool
) -> list[torch.Tensor]:
    shapes = [[*x.shape[:-1], weight.shape[0]] for x, weight in zip(xs, weights, strict=True)]
    if joined:
        shapes[-1][1] += shapes.pop(-2)[1]
    return [xs[0].new_empty(shape) for shape in shapes]


_linears = functional(
    "linears(Tensor[] x, Tensor[] weight, Tensor?[] bias, bool joined) -> Tensor[]", _products, _products_like
)
FEW = 4  # images, for each of which there is a product


def linears(pairs: Sequence[tuple[Any, torch.Tensor]], joined: bool = False) -> list[torch.Tensor]:
    """[layer(x) for layer, x in pairs]; a CUDA graph runs the products of plain layers at the same time.

    joined  the last two results are one, torch.cat((a, b), 1) of tokens [B, T, C], into which the products are written
    """
    plain = all(plain_linear(layer, x) and x.dtype == pairs[0][1].dtype for layer, x in pairs)
    if not plain or (joined and len(pairs[-1][1]) > FEW):
        found = [layer(x) for layer, x in pairs]
        if joined:
            found[-2:] = [torch.cat(found[-2:], dim=1)]
        return found
    layers = [layer for layer, _ in pairs]
    return _linears([x for _, x in pairs], [m.weight for m in layers], [m.bias for m in layers], joined)


def _is_mlp(mlp: Any) -> bool:
    """Whether this is diffusers' MLP, or ours, of two products, and no other code runs around it."""
    named = type(mlp).__name__ in ("FeedForward", "_FeedForward")
    return named and len(mlp.net) == 3 and not changed(mlp)


def mlps(first: Any, x: torch.Tensor, second: Any, y: torch.Tensor) -> list[torch.Tensor]:
    """[first(x), second(y)] of MLPs whose parts are `net`: an activated product, a dropout and a product."""
    if not (_is_mlp(first) and _is_mlp(second)):
        return [first(x), second(y)]
    x, y = (mlp.net[1](mlp.net[0](t)) for mlp, t in ((first, x), (second, y)))
    return linears([(first.net[2], x), (second.net[2], y)])
