"""Drop-in modules for torch_geometric: the layer of LightGCN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recsys.graph_propagate import graph_propagate
from fastkernels.overrides.recsys.graphs import graph_for

_DEFAULTS = {"aggr": "add", "flow": "source_to_target", "node_dim": -2}


class TorchGeometricLGConv(nn.Module):
    """LGConv: x [nodes, F], edge_index [2, edges] or a sparse matrix [nodes, nodes], edge_weight [edges] to [nodes, F].

    Edges are sorted by target at the first call with a tensor, and again after it has changed.
    """

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        super().__init__()
        for name, value in {**_DEFAULTS, **kwargs}.items():
            setattr(self, name, value)
        self.normalize = normalize

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.aggr not in ("add", "sum"):
            return f"it aggregates by {module.aggr!r}, not by a sum"
        for name in ("flow", "node_dim"):
            if getattr(module, name) != _DEFAULTS[name]:
                return f"its {name} is {getattr(module, name)!r}, not {_DEFAULTS[name]!r}"
        if getattr(module, "decomposed_layers", 1) != 1 or getattr(module, "_decomposed_layers", 1) != 1:
            return "it splits the features over several calls"
        return None

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the host's code has to run now, or None: hooks and explanations see each message."""
        if getattr(module, "_explain", None):
            return "an explanation of its messages"
        hooks = [
            n
            for n, found in vars(module).items()
            if n.endswith(("_forward_hooks", "_forward_pre_hooks")) and found
        ]
        hooks = [
            n for n in hooks if n not in ("_forward_hooks", "_forward_pre_hooks")
        ]  # of the module itself
        return f"hooks of its parts ({hooks[0]})" if hooks else None

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> torch.Tensor:
        if (why := _other_input(x, edge_index, edge_weight)) is not None:
            raise UnsupportedArgument(why)
        graph = graph_for(edge_index, edge_weight, x.shape[-2], self.normalize, x.dtype)
        x = x.to(torch.promote_types(x.dtype, graph.values.dtype))  # of messages times weights
        if x.dim() == 2:
            return graph_propagate(x, *graph)
        rows = x.movedim(-2, 0)
        return graph_propagate(rows.flatten(1).contiguous(), *graph).view(rows.shape).movedim(0, -2)


def _other_input(x: Any, edges: Any, weight: Any) -> str | None:
    """Return why the arguments are not those of a graph on the nodes of x, or None."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return "x is not a tensor [nodes, F]"
    nodes = x.shape[-2]
    is_tensor = isinstance(edges, torch.Tensor)
    if not is_tensor or edges.layout != torch.strided:
        shape = tuple(edges.shape if is_tensor else edges.sizes())
        return None if shape == (nodes, nodes) else f"a matrix {list(shape)} for {nodes} nodes"
    if edges.dim() != 2 or len(edges) != 2 or edges.dtype not in (torch.int64, torch.int32):
        return f"edge_index is {edges.dtype} {list(edges.shape)}, not integers [2, edges]"
    if weight is not None and weight.numel() != edges.shape[1]:
        return f"{weight.numel()} weights for {edges.shape[1]} edges"
    return None


TARGETS = {
    "graph_propagate": (
        Target("torch_geometric", "torch_geometric.nn.conv.lg_conv:LGConv", "TorchGeometricLGConv", "leaf"),
    ),
}
