"""Fusion of vLLM's all-reduce with our norm behind it, in a compiled graph: our own form of `fuse_allreduce_rms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fastkernels.core import parallel
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.collective.all_reduce_rms_norm import all_reduce_rms_norm
from fastkernels.overrides.collective.all_reduce_rms_norm_quant_fp8 import all_reduce_rms_norm_quant_fp8
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8
from fk_integrations.vllm.passes.fx_fusions import behind_views, metadata_of, other_norm
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

# A norm, the op that sums before it, and the arguments that both have; torch.ops has them by now
FUSED = (
    (rms_norm, all_reduce_rms_norm, ("weight", "eps", "residual")),
    (rms_norm_quant_fp8, all_reduce_rms_norm_quant_fp8, ("weight", "eps", "scale", "residual")),
)


@dataclass(frozen=True)
class Sums:
    """The sums of one group that are ours.

    group  the name of our communicator; most: bytes of the largest message that is ours
    """

    group: str
    most: int


def fuse(graph: fx.Graph, sums: Mapping[str, Sums], least_tokens: int, unchanged: Counts) -> int:
    """Fuse sums of these groups of vLLM, by name, with a norm of ours that is their only user; how many.

    The norm may be one that also quantizes, for each token or with one given scale.

    least_tokens: of the graph's batches; a message that is not ours with so many tokens is left alone. An op that a
    candidate or a provider requests by name is left unchanged, because the fused op would not call it. Sums of these
    groups that stay are counted in `unchanged`.
    """
    fused, apart = 0, dict[fx.Node, str]()
    if not sums:
        return fused
    by_target = {getattr(torch.ops.fastkernels, each[0].name).default: each for each in FUSED}
    for norm in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized):
        if norm.args[0] not in by_target:
            continue
        ours, op, names = by_target[norm.args[0]]
        source, views = behind_views(norm.kwargs["x"])
        found = _ours(source, sums)
        if found is None:
            continue
        alone = set(source.users) == {views[-1] if views else norm} and set(norm.kwargs["x"].users) == {norm}
        value = source.meta.get("val")
        if requested := [each.name for each in (all_reduce, op, ours) if each.requested]:
            apart[source] = f"{' and '.join(requested)}: requested by name"
        elif (why := other_norm(norm) if ours is rms_norm else _other_scales(norm)) is not None:
            apart[source] = why
        elif not alone:
            apart[source] = "the sum has another user"
        elif value is None or least_tokens * value.shape[-1] * value.itemsize > found.most:
            apart[source] = f"messages from {least_tokens} tokens on are longer than ours"
        if source in apart:
            continue
        kept = {name: norm.kwargs.get(name) for name in names}
        with graph.inserting_before(norm):
            new = graph.call_function(
                torch.ops.higher_order.auto_functionalized,
                (getattr(torch.ops.fastkernels, op.name).default,),
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


def _other_scales(norm: fx.Node) -> str | None:
    """Why our fused op does not compute this rms_norm_quant_fp8: its scales are of tokens, or one is given."""
    plain = {
        a.name: a.default_value
        for a in rms_norm_quant_fp8.overload._schema.arguments
        if a.has_default_value()
    }
    known = {*FUSED[1][2], "x"}
    other = [name for name, value in norm.kwargs.items() if name not in known and value != plain[name]]
    return f"the norm's scales have {', '.join(other)}" if other else None


def _ours(node: fx.Node, sums: Mapping[str, Sums]) -> Sums | None:
    """The group whose sum the node is: by vLLM's opaque op, or by our op, which a trace on a CPU has in its place."""
    name = node.args[1] if len(node.args) > 1 else None
    if node.target is torch.ops.vllm.all_reduce.default:
        return sums.get(str(name or node.kwargs.get("group_name")))
    if node.target is torch.ops.fastkernels.all_reduce.default:
        name = name or node.kwargs.get("group", parallel.TP)
        return next((each for each in sums.values() if each.group == name), None)
    return None
