"""Our ops in a compiled graph, replaced by plain PyTorch, which Inductor fuses with what is around it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from fastkernels.core import registry
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged

_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _rotary_emb(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox_style: bool, cast_cache: bool = True, round_products: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Compute what rotary_emb.reference does, without a change in place."""
    table = cos_sin_cache.index_select(0, positions.flatten())

    def rotated(x: torch.Tensor) -> torch.Tensor:
        rows = table.to(x.dtype) if cast_cache or round_products else table
        compute = x.dtype if round_products else torch.promote_types(x.dtype, torch.float32)
        cos, sin = rows.to(compute).unsqueeze(-2).chunk(2, dim=-1)
        heads = x.reshape(rows.shape[0], -1, head_size)
        turned, rest = heads[..., : rows.shape[-1]].to(compute), heads[..., rows.shape[-1] :]
        x1, x2 = turned.chunk(2, dim=-1) if is_neox_style else (turned[..., ::2], turned[..., 1::2])
        pair = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        new = torch.cat(pair, dim=-1) if is_neox_style else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat((new.to(x.dtype), rest), dim=-1).reshape(x.shape)

    return rotated(query), None if key is None else rotated(key)


# Ops whose `reference` is not what the host compiles, or changes tensors. All others of PLAIN take their SPEC's
# reference, which returns the result and then the new value of each argument that the op mutates.
_OWN: dict[str, Callable[..., Any]] = {"linear": _linear, "rotary_emb": _rotary_emb}
PLAIN = (
    "linear", "rotary_emb", "rms_norm", "gemma_rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul", "gelu",
    "quick_gelu", "relu2", "embedding",
)  # fmt: skip


def use_plain_forms(graph: fx.Graph, names: Collection[str], unchanged: Counts) -> int:
    """Replace the calls of these ops, of PLAIN, by plain PyTorch; return how many.

    graph: functionalized by torch.compile's first form of auto_functionalized. Ops that the graph calls are loaded.
    Calls that stay are counted in `unchanged`.
    """
    calls = {
        packet.default: name
        for name in names
        for called in (name, f"{name}_functional")
        if (packet := getattr(torch.ops.fastkernels, called, None))
    }
    # The matcher cannot replace the None that a functionalized op has for a result: rotary_emb without a key.
    ours = {target: name for target, name in calls.items() if target._schema.returns}
    patterns, replaced = PatternMatcherPass("plain_forms"), 0

    def replace(match: Match, *_: Any, **__: Any) -> None:
        nonlocal replaced
        (node,) = match.nodes
        target: Any = node.args[0] if node.target is _FUNCTIONALIZED else node.target
        if target not in ours:
            return
        given = node.args if node.target is target else ()
        arguments = [
            given[i] if i < len(given) else node.kwargs.get(a.name, a.default_value)
            for i, a in enumerate(target._schema.arguments)
        ]
        nodes = [a for a in arguments if isinstance(a, fx.Node)]
        match.replace_by_example(_of_nodes(_form(ours[target]), arguments), nodes)
        replaced += 1

    # One pattern for all: the matcher calls `replace` for each node that has one of these targets.
    register_graph_pattern(CallFunctionVarArgs([_FUNCTIONALIZED, *ours]), pass_dict=patterns)(replace)
    patterns.apply(graph)
    for node in graph.nodes:
        target = node.args[0] if node.target is _FUNCTIONALIZED else node.target
        if node.op == "call_function" and target in calls:
            why = (
                "the call has no result" if target not in ours else "the compiler's matcher does not find it"
            )
            unchanged[Unchanged(calls[target], "calls of compiled graphs stay ours at all sizes", why)] += 1
    return replaced


def _form(name: str) -> Callable[..., Any]:
    return _OWN.get(name) or registry.get(name).reference


def _of_nodes(form: Callable[..., Any], arguments: list[Any]) -> Callable[..., Any]:
    """A function of the arguments that are nodes, in their order; the others are constants."""

    def call(*values: Any) -> Any:
        left = iter(values)
        return form(*(next(left) if isinstance(a, fx.Node) else a for a in arguments))

    return call
