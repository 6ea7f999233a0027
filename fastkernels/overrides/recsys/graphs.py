"""Graphs of a host's layers: made of its edges once, and kept with them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fastkernels.overrides.recsys.graph_propagate import Graph, graph_of

# {edges: (what it was made for, their weights, the graph)}: the layers of a model, and its later calls, share one
_graphs: Any = WeakTensorKeyDictionary()


def graph_for(
    edges: Any, weight: torch.Tensor | None, nodes: int, normalize: bool, dtype: torch.dtype
) -> Graph:
    """The graph of edges as torch_geometric's layers take them; from the last call with them if they are unchanged.

    edges: [2, edges], sources and targets; or a sparse matrix [nodes, nodes] of torch or torch_sparse whose rows are
    targets, with the weights. Raises IndexError on a CPU for an edge of a node that does not exist, as torch_geometric.
    """
    if not isinstance(edges, torch.Tensor):
        target, source, values = edges.coo()
        return graph_of(torch.stack((source, target)), nodes, values, normalize, dtype)
    tensors = [t for t in (edges, weight) if t is not None]
    if torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):  # without versions
        return _made(edges, weight, nodes, normalize, dtype)
    made_for = (nodes, normalize, dtype, *map(_content, tensors))
    kept = _graphs.get(edges)
    if kept is None or kept[0] != made_for or kept[1] is not weight:
        kept = made_for, weight, _made(edges, weight, nodes, normalize, dtype)
        _graphs[edges] = kept
    return kept[2]


def _content(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the version of a tensor and the place of its data, which `tensor.data = ...` changes."""
    return tensor._version, tensor.data_ptr() if tensor.layout == torch.strided else 0


def _made(
    edges: torch.Tensor, weight: torch.Tensor | None, nodes: int, normalize: bool, dtype: torch.dtype
) -> Graph:
    if edges.layout != torch.strided:
        matrix = edges.to_sparse_coo().coalesce()
        target, source = matrix.indices()
        return graph_of(torch.stack((source, target)), nodes, matrix.values().to(dtype), normalize, dtype)
    if edges.is_cpu and edges.numel() and not torch.compiler.is_compiling():
        least, most = int(edges.min()), int(edges.max())
        if least < 0 or most >= nodes:
            wrong = least if least < 0 else most
            raise IndexError(f"edge_index has the node {wrong}, and there are {nodes}: 0 to {nodes - 1}")
    return graph_of(edges, nodes, weight, normalize, dtype)
