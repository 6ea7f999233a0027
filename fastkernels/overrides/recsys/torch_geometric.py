"""Drop-in modules for torch_geometric: the layer of LightGCN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastkernels.core.spec import Target
from fastkernels.overrides.recsys.graph_propagate import Graph, graph_of, graph_propagate

# {edge_index: (what it was made for, the graph)}: the layers of a model, and its later calls, share one
_graphs: Any = WeakTensorKeyDictionary()
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
        hooks = [n for n, found in vars(module).items() if n.endswith(("_forward_hooks", "_forward_pre_hooks")) and found]
        hooks = [n for n in hooks if n not in ("_forward_hooks", "_forward_pre_hooks")]  # of the module itself
        return f"hooks of its parts ({hooks[0]})" if hooks else None

    def forward(self, x: Any, edge_index: Any, edge_weight: Any = None) -> torch.Tensor:
        plain = isinstance(x, torch.Tensor) and isinstance(edge_index, torch.Tensor) and x.dim() == 2
        if not plain:  # torch_sparse's matrices, and features with more dimensions
            return super(type(self), self).forward(x, edge_index, edge_weight)
        graph = _graph(edge_index, edge_weight, len(x), self.normalize, x.dtype)
        return graph_propagate(x, *graph)


def _graph(
    edge_index: torch.Tensor, weight: torch.Tensor | None, nodes: int, normalize: bool, dtype: torch.dtype
) -> Graph:
    """The graph of these edges; from the last call if the tensors are the same and unchanged."""
    tensors = [t for t in (edge_index, weight) if t is not None]
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):  # without versions
        return _made(edge_index, weight, nodes, normalize, dtype)
    made_for = (nodes, normalize, dtype, weight is None, *(t._version for t in tensors))
    kept = _graphs.get(edge_index)
    if kept is None or kept[0] != made_for or kept[1] is not weight:
        kept = made_for, weight, _made(edge_index, weight, nodes, normalize, dtype)
        _graphs[edge_index] = kept
    return kept[2]


def _made(
    edge_index: torch.Tensor, weight: torch.Tensor | None, nodes: int, normalize: bool, dtype: torch.dtype
) -> Graph:
    if edge_index.layout != torch.strided:  # a matrix whose rows are targets
        coo = edge_index.to_sparse_coo().coalesce()
        target, source = coo.indices()
        return graph_of(torch.stack((source, target)), nodes, coo.values().to(dtype), normalize, dtype)
    return graph_of(edge_index, nodes, weight, normalize, dtype)


TARGETS = {
    "graph_propagate": (
        Target(
            "torch_geometric", "torch_geometric.nn.conv.lg_conv:LGConv", "TorchGeometricLGConv", "leaf"
        ),
    ),
}
