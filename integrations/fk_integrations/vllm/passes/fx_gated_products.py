"""The product of packed gate and up, and the activation after it, as one op in a compiled graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.linear.linear_silu_and_mul import linear_silu_and_mul
from fk_integrations.vllm.passes.fx_fusions import behind_views, metadata_of
from fk_integrations.vllm.passes.fx_products import product_of
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

OPS = silu_and_mul, linear_silu_and_mul  # torch.ops has them by now


@dataclass(frozen=True)
class Prompts:
    """The compile ranges of prompts, and the products in them that ops of ours compute.

    The ops run our kernels in batches of the sizes at which these were measured to win, and in others cuBLAS's.

    more_than  the largest number of tokens in which they stay the host's
    shapes     N, K and dtype of packed gate and up: one op computes them with their activation
    products   those of other weights
    """

    more_than: int
    shapes: frozenset[tuple[Any, ...]]
    products: frozenset[tuple[Any, ...]] = frozenset()


def fuse(graph: fx.Graph, shapes: Collection[tuple[Any, ...]], unchanged: Counts) -> int:
    """Replace silu_and_mul after a product with a weight of one of these shapes (N, K, dtype); return how many.

    graph: with our silu_and_mul, and linear layers of ours or of aten. Others stay, and are counted in `unchanged`.
    """

    def stays(why: str) -> None:
        what = "activations of compiled graphs stay apart"
        unchanged[Unchanged(linear_silu_and_mul.name, what, why)] += 1

    replaced = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.fastkernels.silu_and_mul.default):
        source, views = behind_views(node.args[0])
        given = product_of(source)
        if isinstance(given, str):
            stays(given)
            continue
        if set(source.users) != {views[-1] if views else node}:
            stays("the product has another user")
            continue
        if given.key not in shapes:
            stays(f"no kernel of ours is faster for a weight of {given.key[0]} x {given.key[1]}")
            continue
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.fastkernels.linear_silu_and_mul.default, tuple(given))
        new.meta.update(metadata_of(node))
        node.replace_all_uses_with(new)
        for old in (node, *views, source):
            graph.erase_node(old)
        replaced += 1
    return replaced
