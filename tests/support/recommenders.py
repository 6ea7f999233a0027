"""Tiny checkpoints of recommenders, with random weights under the key names of torchrec and torch_geometric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastkernels.overrides.recsys.cases import bipartite

DLRM = {
    "architectures": ["DLRM_DCN"], "model_type": "dlrm_dcn", "dtype": "float32", "dense_in_features": 5,
    "tables": [
        {"name": "t0", "num_embeddings": 50, "feature_names": ["f0", "f3"]},
        {"name": "t1", "num_embeddings": 7, "feature_names": ["f1"]},
        {"name": "t2", "num_embeddings": 300},
    ],
    "embedding_dim": 8, "pooling": "sum", "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [12, 6, 1],
    "dcn_num_layers": 2, "dcn_low_rank_dim": 4,
}  # fmt: skip
LIGHTGCN = {
    "architectures": ["LightGCN"], "model_type": "lightgcn", "dtype": "float32", "num_users": 12, "num_items": 40,
    "embedding_dim": 16, "num_layers": 3,
}  # fmt: skip
EDGES = 90


def dlrm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of the state dict of torchrec's DLRM_DCN."""
    dim, rank = config["embedding_dim"], config["dcn_low_rank_dim"]
    features = sum(len(t.get("feature_names", [0])) for t in config["tables"])
    size = (features + 1) * dim
    bags = "sparse_arch.embedding_bag_collection.embedding_bags"
    made: dict[str, tuple[int, ...]] = {
        f"{bags}.{t['name']}.weight": (t["num_embeddings"], dim) for t in config["tables"]
    }

    def layers(prefix: str, first: int, sizes: list[int]) -> None:
        for i, (a, b) in enumerate(zip([first, *sizes], sizes, strict=False)):
            made[f"{prefix}._mlp.{i}._linear.weight"] = (b, a)
            made[f"{prefix}._mlp.{i}._linear.bias"] = (b,)

    layers("dense_arch.model", config["dense_in_features"], config["dense_arch_layer_sizes"])
    for i in range(config["dcn_num_layers"]):
        made[f"inter_arch.crossnet.W_kernels.{i}"] = (size, rank)
        made[f"inter_arch.crossnet.V_kernels.{i}"] = (rank, size)
        made[f"inter_arch.crossnet.bias.{i}"] = (size,)
    over = config["over_arch_layer_sizes"]
    layers("over_arch.model.0", size, over[:-1])
    made["over_arch.model.1.weight"] = (over[-1], over[-2])
    made["over_arch.model.1.bias"] = (over[-1],)
    return made


def dlrm(folder: Path, prefix: str = "", **changes: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint; prefix: of its keys. Returns the state dict."""
    config = {**DLRM, **changes}
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.5 * torch.randn(shape, generator=generator) for key, shape in dlrm_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({prefix + key: value for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return state


def lightgcn(folder: Path, weighted: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint and its graph. Returns the state dict, edge_index and edge_weight."""
    config = {**LIGHTGCN, **changes}
    generator = torch.Generator().manual_seed(0)
    nodes = config["num_users"] + config["num_items"]
    state = {
        "embedding.weight": torch.randn(nodes, config["embedding_dim"], generator=generator),
        "alpha": torch.rand(config["num_layers"] + 1, generator=generator),
    }
    graph = {"edge_index": bipartite(config["num_users"], config["num_items"], EDGES, generator)}
    if weighted:
        graph["edge_weight"] = torch.rand(2 * EDGES, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    save_file(graph, folder / "graph.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return {**state, **graph}


def impressions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples for DLRM: bags of no id to four, some features left out."""
    generator = torch.Generator().manual_seed(seed)
    rows, made = {"f0": 50, "f3": 50, "f1": 7, "t2": 300}, []
    for i in range(count):
        sparse: dict[str, Any] = {}
        for j, (name, size) in enumerate(rows.items()):
            ids = torch.randint(size, ((i + j) % 5,), generator=generator).tolist()
            if ids or j % 2:
                sparse[name] = ids
        made.append({"dense": torch.randn(5, generator=generator).tolist(), "sparse": sparse})
    return made
