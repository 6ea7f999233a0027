"""Products with a weight in a compiled graph: linear layers of ours, of aten, and what Inductor makes of these."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx

from fastkernels.overrides.linear.linear import linear
from fk_integrations.vllm.passes.fx_fusions import arguments, metadata_of
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

OPS = (linear,)  # torch.ops has it by now
_OURS = torch.ops.fastkernels.linear.default
_TRANSPOSED = (torch.ops.aten.t.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int)
_ADDMM = torch.ops.aten.addmm.default
ADDED = "what the product adds is no vector of N numbers"
_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.mm.default, _ADDMM)


class Product(NamedTuple):
    """x [..., K], weight [N, K] and bias [N] or None of a linear layer's node."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def key(self) -> tuple[int, int, torch.dtype]:
        """N, K and dtype of the weight."""
        weight = self.weight.meta["val"]
        return *weight.shape, weight.dtype


def use_ours(graph: fx.Graph, shapes: Collection[tuple[Any, ...]], unchanged: Counts) -> int:
    """Have our linear compute the products with weights of these shapes (N, K, dtype); return how many became ours.

    All others stay. Those whose weight or form is not recognized are counted in `unchanged`; the host's kernels are
    known to be as fast for the other shapes.
    """
    replaced = 0
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            added, given = None, product_of(node)
            if given == ADDED and target is _ADDMM:
                added, given = node.args[0], _product(node.args[1], node.args[2], None)
            if isinstance(given, str):
                unchanged[Unchanged(linear.name, "products of compiled graphs stay the host's", given)] += 1
                continue
            if given.key not in shapes:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(_OURS, tuple(given))
                new.meta.update(metadata_of(node))
                if added is not None:  # Inductor fuses it with what comes next
                    new = graph.call_function(torch.ops.aten.add.Tensor, (added, new))
                    new.meta.update(metadata_of(node))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            replaced += 1
    return replaced


def product_of(node: Any) -> Product | str:
    """The product that a node computes, with a bias; or why it is none."""
    target: Any = node.target
    if target is _OURS or target is torch.ops.aten.linear.default:
        given = arguments(node)
        return _of(given["x"] if "x" in given else given["input"], given["weight"], given.get("bias"))
    if target is torch.ops.aten.mm.default:
        return _product(node.args[0], node.args[1], None)
    if target is not _ADDMM:
        return f"the input of the activation is of {target}"
    bias, x, transposed = node.args
    if node.kwargs:
        return "an addmm with scales"
    return _product(x, transposed, bias)


def _product(x: fx.Node, transposed: fx.Node, bias: fx.Node | None) -> Product | str:
    return _of(x, _behind_transpose(transposed), bias)


def _of(x: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> Product | str:
    if weight is None or any("val" not in part.meta for part in (x, weight)):
        return "the product's weight is not a transposed matrix"
    a, b = x.meta["val"], weight.meta["val"]
    if b.dim() != 2 or not all(isinstance(size, int) for size in b.shape):
        return "the weight's sizes are unknown"
    if a.dtype != b.dtype:
        return f"x is {a.dtype}, the weight {b.dtype} {tuple(b.shape)}"
    if bias is not None and tuple(bias.meta["val"].shape) != tuple(b.shape[:1]):
        return ADDED
    return Product(x, weight, bias)


def _behind_transpose(node: Any) -> fx.Node | None:
    """The matrix that a node transposes; None if it does not."""
    if node.target not in _TRANSPOSED or "val" not in node.args[0].meta:
        return None
    source = node.args[0].meta["val"]
    rest = tuple(node.args[1:])
    if source.dim() != 2 or rest not in ((), ([1, 0],), (0, 1), (1, 0), (-1, -2), (-2, -1)):
        return None
    return node.args[0]  # type: ignore[no-any-return]
