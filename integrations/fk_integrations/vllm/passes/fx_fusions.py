"""Fusion of our norms and activations with our quantization in a compiled graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8
from fastkernels.overrides.quant.rms_norm_quant_fp8 import rms_norm_quant_fp8
from fastkernels.overrides.quant.silu_mul_quant_fp8 import silu_mul_quant_fp8
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

OPS = (
    quantize_fp8,
    rms_norm,
    rms_norm_quant_fp8,
    silu_and_mul,
    silu_mul_quant_fp8,
)  # torch.ops has them by now
PER_TOKEN = {"group_size": -1}
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def fuse_quantization(graph: fx.Graph, unchanged: Counts) -> int:
    """Fuse rms_norm and silu_and_mul with a per-token quantization that is the only user of their result; how many.

    graph: functionalized by torch.compile's first form of auto_functionalized; other forms are left unchanged. The
    fused ops give the same bits. An op that a candidate or a provider requests by name is left unchanged, because the
    fused op would not call it (Op.requested). Quantizations that stay are counted in `unchanged`, in the row of
    linear_fp8, whose input they make.
    """
    ops = torch.ops.fastkernels
    fused = 0
    for node in graph.find_nodes(op="call_function", target=ops.quantize_fp8.default):
        source, views = behind_views(arguments(node)["x"])
        norm = None if source.target is ops.silu_and_mul.default else norm_of(source)
        if why := _apart(node, source, views, norm):
            unchanged[Unchanged("linear_fp8", "quantizations of compiled graphs stay apart", why)] += 1
            continue
        if norm is None:
            with graph.inserting_before(node):
                new = graph.call_function(ops.silu_mul_quant_fp8.default, (source.args[0],))
            new.meta.update(metadata_of(node))
            node.replace_all_uses_with(new)
            erased = [node, *views, source]
        else:
            assert isinstance(norm, fx.Node)
            new = quantizing(graph, norm, node)
            parts = [*moved(node, {0: 0, 1: 1}), *moved(norm, {1: 2})]
            for part, index in parts:
                with graph.inserting_after(new):
                    again = graph.call_function(operator.getitem, (new, index))
                again.meta.update(metadata_of(part))
                part.replace_all_uses_with(again)
            erased = [part for part, _ in parts] + [node, *views, source, norm]
        for old in erased:
            graph.erase_node(old)
        fused += 1
    return fused


def _apart(node: fx.Node, source: fx.Node, views: list[fx.Node], norm: fx.Node | str | None) -> str:
    """Why a quantization is not fused with what it quantizes: a norm, or an activation (None); '' if it is."""
    if quantize_fp8.requested:
        return f"{quantize_fp8.name} is requested by name"
    if {name: value for name, value in arguments(node).items() if name != "x"} != PER_TOKEN:
        return "a scale is not per token"
    if set(source.users) != {views[-1] if views else node}:
        return "what is quantized has another user"
    if norm is None and silu_and_mul.requested:
        return f"{silu_and_mul.name} is requested by name"
    return norm if isinstance(norm, str) else ""


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's call that differ from their default, by name."""
    target: Any = node.target
    schema = target._schema.arguments
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    plain = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {name: value for name, value in given.items() if name not in plain or value != plain[name]}


def behind_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node behind views that keep its shape and have one user, and these views, the last one first."""
    views: list[fx.Node] = []
    while node.target in VIEWS and len(node.users) == 1:
        source: Any = node.args[0]
        if "val" not in node.meta or tuple(source.meta["val"].shape) != tuple(node.meta["val"].shape):
            break
        views.append(node)
        node = source
    return node, views


def norm_of(source: fx.Node) -> fx.Node | str:
    """The rms_norm with this output, if rms_norm_quant_fp8 can compute it; or why not."""
    norm: Any = source.args[0] if source.target is operator.getitem else None
    if getattr(norm, "target", None) is not torch.ops.higher_order.auto_functionalized or source.args[1] != 0:
        return f"what is quantized is of {source.target}"
    if norm.args[0] is not torch.ops.fastkernels.rms_norm.default:
        return f"what is quantized is of {norm.args[0]}"
    if rms_norm.requested:
        return f"{rms_norm.name} is requested by name"
    if (why := other_norm(norm)) is not None:
        return why
    alone = all(user is source or user.args[1] != 0 for user in norm.users)
    return norm if alone else "the norm's result has another user"


def other_norm(norm: fx.Node) -> str | None:
    """Why our fused ops do not compute this rms_norm: they round once, after the product with the weight."""
    if norm.kwargs.get("weight") is None:
        return "the norm has no weight"
    if norm.kwargs.get("var_hidden_size") is not None:
        return "the norm is of a part of each row"
    return "the norm rounds twice" if norm.kwargs.get("cast_x_before_out_mul", True) else None


def quantizing(graph: fx.Graph, norm: fx.Node, quantize: fx.Node) -> fx.Node:
    """Insert rms_norm_quant_fp8 before `norm`: values, scales, new residual."""
    kept = {name: norm.kwargs.get(name) for name in ("x", "weight", "eps", "residual")}
    op = torch.ops.fastkernels.rms_norm_quant_fp8.default
    with graph.inserting_before(norm):
        new = graph.call_function(torch.ops.higher_order.auto_functionalized, (op,), {**kept, **PER_TOKEN})
    if "val" in norm.meta and "val" in quantize.meta:
        new.meta.update({**metadata_of(norm), "val": (*quantize.meta["val"], *norm.meta["val"][1:])})
    return new


def metadata_of(node: fx.Node) -> dict[str, Any]:
    """The metadata of a node that also holds for a node with other arguments and the same results."""
    return {name: node.meta[name] for name in ("val", "stack_trace", "nn_module_stack") if name in node.meta}


def moved(node: fx.Node, indices: dict[int, int]) -> Iterator[tuple[fx.Node, int]]:
    """The node's results that have users, and their positions among the new node's results."""
    for user in list(node.users):
        index: Any = user.args[1] if user.target is operator.getitem else None
        if index in indices:
            yield user, indices[index]
