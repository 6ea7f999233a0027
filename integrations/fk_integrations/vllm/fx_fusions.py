"""Ops of ours that are one kernel together, found in a compiled graph: a norm or an activation and its quantization."""

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

OPS = (
    quantize_fp8,
    rms_norm,
    rms_norm_quant_fp8,
    silu_and_mul,
    silu_mul_quant_fp8,
)  # torch.ops has them by now
PER_TOKEN = {"group_size": -1}
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def fuse_quantization(graph: fx.Graph) -> int:
    """Put rms_norm and silu_and_mul whose result is only quantized, token by token, together with that. How many.

    graph: functionalized as torch.compile does for ops that write their arguments (auto_functionalized, its first
    form: another one is left as it is). The new ops give the same bits as the two in turn. An op that somebody asked
    for, by a candidate or a provider, stays: the new one would not call it (Op.asked).
    """
    ops = torch.ops.fastkernels
    fused = 0
    if quantize_fp8.asked:
        return fused
    for node in graph.find_nodes(op="call_function", target=ops.quantize_fp8.default):
        given = arguments(node)
        source, views = behind_views(given.pop("x"))
        if given != PER_TOKEN or set(source.users) != {views[-1] if views else node}:
            continue
        if source.target is ops.silu_and_mul.default and not silu_and_mul.asked:
            with graph.inserting_before(node):
                new = graph.call_function(ops.silu_mul_quant_fp8.default, (source.args[0],))
            new.meta.update(said(node))
            node.replace_all_uses_with(new)
            erased = [node, *views, source]
        elif (norm := norm_of(source)) is not None:
            new = quantizing(graph, norm, node)
            parts = [*moved(node, {0: 0, 1: 1}), *moved(norm, {1: 2})]
            for part, index in parts:
                with graph.inserting_after(new):
                    again = graph.call_function(operator.getitem, (new, index))
                again.meta.update(said(part))
                part.replace_all_uses_with(again)
            erased = [part for part, _ in parts] + [node, *views, source, norm]
        else:
            continue
        for old in erased:
            graph.erase_node(old)
        fused += 1
    return fused


def arguments(node: fx.Node) -> dict[str, Any]:
    """Of a call of an op: those that are not their default, by name."""
    target: Any = node.target
    schema = target._schema.arguments
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    plain = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {name: value for name, value in given.items() if name not in plain or value != plain[name]}


def behind_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a node is a view of the same shape of, and these views, the last one first, where nobody else takes them."""
    views: list[fx.Node] = []
    while node.target in VIEWS and len(node.users) == 1:
        source: Any = node.args[0]
        if "val" not in node.meta or tuple(source.meta["val"].shape) != tuple(node.meta["val"].shape):
            break
        views.append(node)
        node = source
    return node, views


def norm_of(source: fx.Node) -> fx.Node | None:
    """The rms_norm whose output this is, if it is one that rms_norm_quant_fp8 computes."""
    if source.target is not operator.getitem or source.args[1] != 0 or rms_norm.asked:
        return None
    norm: Any = source.args[0]
    if norm.target is not torch.ops.higher_order.auto_functionalized:
        return None
    if norm.args[0] is not torch.ops.fastkernels.rms_norm.default or norm.kwargs.get("weight") is None:
        return None
    # The op rounds once, behind the product with the weight.
    twice = norm.kwargs.get("cast_x_before_out_mul", True)
    whole = norm.kwargs.get("var_hidden_size") is None and not twice
    alone = all(user is source or user.args[1] != 0 for user in norm.users)
    return norm if whole and alone else None


def quantizing(graph: fx.Graph, norm: fx.Node, quantize: fx.Node) -> fx.Node:
    """rms_norm_quant_fp8 before `norm`: its values, its scales, the new residual."""
    kept = {name: norm.kwargs.get(name) for name in ("x", "weight", "eps", "residual")}
    op = torch.ops.fastkernels.rms_norm_quant_fp8.default
    with graph.inserting_before(norm):
        new = graph.call_function(torch.ops.higher_order.auto_functionalized, (op,), {**kept, **PER_TOKEN})
    if "val" in norm.meta and "val" in quantize.meta:
        new.meta.update({**said(norm), "val": (*quantize.meta["val"], *norm.meta["val"][1:])})
    return new


def said(node: fx.Node) -> dict[str, Any]:
    """Of what is known of a node, that which holds for one with other arguments and the same results."""
    return {name: node.meta[name] for name in ("val", "stack_trace", "nn_module_stack") if name in node.meta}


def moved(node: fx.Node, indices: dict[int, int]) -> Iterator[tuple[fx.Node, int]]:
    """The node's results that are taken, and where they are among the new one's."""
    for user in list(node.users):
        index: Any = user.args[1] if user.target is operator.getitem else None
        if index in indices:
            yield user, indices[index]
