"""Fusion of vLLM's all-reduce with our norm behind it, in a compiled graph: our own form of `fuse_allreduce_rms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fastkernels.core import parallel
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.all_reduce_rms_norm import all_reduce_rms_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fk_integrations.vllm.passes.fx_fusions import behind_views, metadata_of, other_norm
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

OPS = (all_reduce, all_reduce_rms_norm, rms_norm)  # torch.ops has them by now


@dataclass(frozen=True)
class Sums:
    """The sums of one group that are ours.

    group  the name of our communicator; most: bytes of the largest message that is ours
    """

    group: str
    most: int


def fuse(graph: fx.Graph, sums: Mapping[str, Sums], least_tokens: int, unchanged: Counts) -> int:
    """Fuse sums of these groups of vLLM, by name, with a norm of ours that is their only user; how many.

    least_tokens: of the graph's batches; a message that is not ours with so many tokens is left alone. An op that a
    candidate or a provider requests by name is left unchanged, because the fused op would not call it. Sums of these
    groups that stay are counted in `unchanged`.
    """
    fused, apart = 0, dict[fx.Node, str]()
    if not sums:
        return fused
    requested = [op.name for op in OPS if op.requested]
    for norm in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized):
        if norm.args[0] is not torch.ops.fastkernels.rms_norm.default:
            continue
        source, views = behind_views(norm.kwargs["x"])
        found = _ours(source, sums)
        if found is None:
            continue
        alone = set(source.users) == {views[-1] if views else norm} and set(norm.kwargs["x"].users) == {norm}
        value = source.meta.get("val")
        if requested:
            apart[source] = f"{' and '.join(requested)}: requested by name"
        elif (why := other_norm(norm)) is not None:
            apart[source] = why
        elif not alone:
            apart[source] = "the sum has another user"
        elif value is None or least_tokens * value.shape[-1] * value.itemsize > found.most:
            apart[source] = f"messages from {least_tokens} tokens on are longer than ours"
        if source in apart:
            continue
        kept = {name: norm.kwargs.get(name) for name in ("weight", "eps", "residual")}
        op = torch.ops.fastkernels.all_reduce_rms_norm.default
        with graph.inserting_before(norm):
            new = graph.call_function(
                torch.ops.higher_order.auto_functionalized,
                (op,),
                {"x": source.args[0], **kept, "group": found.group},
            )
        new.meta.update(metadata_of(norm))
        norm.replace_all_uses_with(new)
        for old in (norm, *views, source):
            graph.erase_node(old)
        fused += 1
    for node in graph.nodes:
        if node.op == "call_function" and _ours(node, sums) is not None:
            why = apart.get(node, "no norm of ours follows")
            unchanged[Unchanged(all_reduce.name, "sums of compiled graphs stay apart", why)] += 1
    return fused


def _ours(node: fx.Node, sums: Mapping[str, Sums]) -> Sums | None:
    """The group whose sum the node is: by vLLM's opaque op, or by our op, which a trace on a CPU has in its place."""
    name = node.args[1] if len(node.args) > 1 else None
    if node.target is torch.ops.vllm.all_reduce.default:
        return sums.get(str(name or node.kwargs.get("group_name")))
    if node.target is torch.ops.fastkernels.all_reduce.default:
        name = name or node.kwargs.get("group", parallel.TP)
        return next((each for each in sums.values() if each.group == name), None)
    return None
