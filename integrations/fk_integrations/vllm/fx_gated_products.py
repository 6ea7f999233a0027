"""The product of packed gate and up, and the activation after it, as one op in a compiled graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_silu_and_mul import linear_silu_and_mul
from fk_integrations.vllm.fx_fusions import arguments, behind_views, metadata_of

OPS = silu_and_mul, linear, linear_silu_and_mul  # torch.ops has them by now
_TRANSPOSED = (torch.ops.aten.t.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int)


@dataclass(frozen=True)
class Prompts:
    """The compile ranges in which one op computes products of gate and up with their activation.

    The op runs our kernel in batches of the sizes at which that was measured to win, and in others cuBLAS's.

    more_than  the largest number of tokens in which they stay apart
    shapes     N, K and dtype of the products
    """

    more_than: int
    shapes: frozenset[tuple[Any, ...]]


def fuse(graph: fx.Graph, shapes: Collection[tuple[Any, ...]], apart: Counter[str]) -> int:
    """Replace silu_and_mul after a product with a weight of one of these shapes (N, K, dtype); return how many.

    graph: with our silu_and_mul, and linear layers of ours or of aten. Others are left, and counted in `apart`.
    """
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.fastkernels.silu_and_mul.default):
        source, views = behind_views(node.args[0])
        given = _product(source)
        if isinstance(given, str):
            apart[given] += 1
            continue
        if set(source.users) != {views[-1] if views else node}:
            apart["the product has another user"] += 1
            continue
        x, weight, bias = given
        key = (*weight.meta["val"].shape, weight.meta["val"].dtype)
        if key not in shapes:
            apart[f"no kernel of ours is faster for a weight of {key[0]} x {key[1]}"] += 1
            continue
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.fastkernels.linear_silu_and_mul.default, (x, weight, bias))
        new.meta.update(metadata_of(node))
        node.replace_all_uses_with(new)
        for old in (node, *views, source):
            graph.erase_node(old)
        replaced += 1
    return replaced


def _product(node: Any) -> tuple[fx.Node, fx.Node, fx.Node | None] | str:
    """x, weight and bias of a linear layer's node; or why it is none."""
    target: Any = node.target
    x: Any
    weight: Any
    bias: Any
    if target is torch.ops.fastkernels.linear.default or target is torch.ops.aten.linear.default:
        given = arguments(node)
        x, weight, bias = given.get("x", given.get("input")), given["weight"], given.get("bias")
    elif target is torch.ops.aten.mm.default:
        (x, transposed), bias = node.args, None
        weight = _behind_transpose(transposed)
    elif target is torch.ops.aten.addmm.default:
        bias, x, transposed = node.args
        weight = _behind_transpose(transposed)
        if node.kwargs or bias.meta["val"].dim() != 1:
            return "an addmm with scales or a matrix"
    else:
        return f"the input of the activation is of {target}"
    if weight is None or any("val" not in part.meta for part in (x, weight)):
        return "the product's weight is not a transposed matrix"
    a, b = x.meta["val"], weight.meta["val"]
    if b.dim() != 2 or not all(isinstance(size, int) for size in b.shape):
        return "the weight's sizes are unknown"
    if a.dtype != b.dtype or b.shape[0] % 2:
        return f"x is {a.dtype}, the weight {b.dtype} {tuple(b.shape)}"
    return x, weight, bias


def _behind_transpose(node: Any) -> fx.Node | None:
    """The matrix that a node transposes; None if it does not."""
    if node.target not in _TRANSPOSED or "val" not in node.args[0].meta:
        return None
    source = node.args[0].meta["val"]
    rest = tuple(node.args[1:])
    if source.dim() != 2 or rest not in ((), ([1, 0],), (0, 1), (1, 0), (-1, -2), (-2, -1)):
        return None
    return node.args[0]  # type: ignore[no-any-return]
