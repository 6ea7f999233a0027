"""LightGCN (He et al., arXiv 2002.02126): recommendations from a graph of users and items, torch_geometric's LightGCN.

Its checkpoint is the state dict of torch_geometric's class, `embedding.weight` and `alpha`. Next to it are
`graph.safetensors` with `edge_index` [2, edges] int64 and optionally `edge_weight` [edges], which that class takes as
arguments, and a config.json of ours:

    {"architectures": ["LightGCN"], "model_type": "lightgcn", "dtype": "float32", "num_users": 29858,
     "num_items": 40981, "embedding_dim": 64, "num_layers": 3}

Users are nodes 0 to num_users - 1, and item i is node num_users + i. Embeddings are propagated once, when the weights
are loaded. Fields that are left out are these, of the Gowalla data set. With random weights and no graph file, the
graph is random, too: `num_edges`, by default 16 for each node.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.interfaces.samples import (
    Best,
    Graphs,
    Place,
    Scores,
    Together,
    fields,
    ids_of,
    is_number,
    rows_of,
)
from fastkernels.models.recsys.dlrm_v2 import positive
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.recsys.cases import bipartite
from fastkernels.overrides.recsys.graph_propagate import Graph, graph_of, graph_propagate
from fastkernels.overrides.recsys.top_k_scores import top_k_scores

GRAPH = "graph.safetensors"
NUMBERS = ("num_users", "num_items", "embedding_dim", "num_layers")
DEFAULTS = {"num_users": 29_858, "num_items": 40_981, "embedding_dim": 64, "num_layers": 3}
MOST = 1000  # recommendations of one request
LARGE = 1 << 16  # ids: joining them takes longer than one more copy to the device
GRAPHED, SCORES = 1 << 16, 1 << 24  # products, and scores of all items, that a CUDA graph computes at most
LEAST = 64  # seen items that a graph has room for
FIELDS = ("user", "k", "exclude_seen", "items")


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    raw = {**DEFAULTS, **raw}
    for name in NUMBERS:
        positive(raw, name)
    edges = raw.get("num_edges", 16 * (raw["num_users"] + raw["num_items"]))
    return {**raw, "num_edges": positive({"num_edges": edges}, "num_edges")}


@dataclass(frozen=True)
class Sample:
    """Users with items to score, or a user with the number of the best ones to find.

    users [n]; items: those of the first user, then of the next; counts [n]: how many each has
    """

    users: np.ndarray
    items: np.ndarray | None = None
    counts: np.ndarray | None = None
    k: int = 0
    exclude: bool = False

    @property
    def size(self) -> int:
        return self.k if self.items is None else len(self.items)


class LightGCN(nn.Module):
    """config: the fields of read_config."""

    ops = ("graph_propagate", "top_k_scores")
    # The embeddings of all nodes and of the items, propagated
    final: torch.Tensor
    items: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_users, self.num_items = config.num_users, config.num_items
        nodes = config.num_users + config.num_items
        self.graphs: Graphs | None = None
        self._random = config.num_edges
        self._ids = np.int32 if nodes < 1 << 31 else np.int64
        self.alpha = nn.Parameter(torch.empty(config.num_layers + 1, dtype=torch.float32))
        self.alpha.fill = 1.0 / (config.num_layers + 1)  # type: ignore[attr-defined]
        self.embedding = nn.Embedding(nodes, config.embedding_dim)

    def forward(self, graph: Graph) -> torch.Tensor:
        """The propagated embeddings [nodes, embedding_dim]."""
        return graph_propagate(self.embedding.weight, *graph, self.alpha)

    def ready(self, folder: Path, dummy: bool) -> None:
        """Read the graph, and propagate. Raises CheckpointError for one that is missing or does not fit."""
        file, nodes = folder / GRAPH, len(self.embedding.weight)
        device, weight = self.embedding.weight.device, None
        if dummy and not file.is_file():
            generator = torch.Generator().manual_seed(0)
            edges = bipartite(self.num_users, self.num_items, max(self._random // 2, 1), generator)
        else:
            edges, weight = _read(file, nodes)
        self.graph = graph_of(edges.to(device), nodes, None if weight is None else weight.to(device))
        self._seen_starts, self._seen = _seen(edges.numpy(), self.num_users, self.num_items)
        self.refresh()

    def refresh(self) -> None:
        """Propagate the embeddings again."""
        with torch.inference_mode():
            self.final = self(self.graph)
            self.items = self.final[self.num_users :]

    def read(self, given: Any) -> Sample:
        """See dlrm_v2.py. given: {"user": id, "items": [ids]}, or {"user": id, "k": 20, "exclude_seen": true}.

        The first may have several users, with a list of items for each: {"user": [ids], "items": [[ids], ...]}. The
        second returns the user's k best items, without those that the graph has an edge to.
        """
        fields(given, FIELDS)
        users = ids_of(given.get("user"), "`user`", self.num_users, "the table of users")
        if "items" in given:
            if extra := [name for name in ("k", "exclude_seen") if name in given]:
                raise ValueError(f"the input has `items`, which are scored as they are, and {extra[0]!r}")
            where = "`items`", self.num_items, "the table of items", self._ids
            if len(users) == 1 and not _nested(given["items"]):
                items = ids_of(given["items"], *where)
                counts = np.array([len(items)])
            else:
                items, counts = rows_of(given["items"], len(users), *where)
            if not counts.all() or not len(counts):
                raise ValueError("the input has no ids in `items`")
            return Sample(users, items, counts)
        if len(users) != 1:
            raise ValueError(f"the input needs one `user`, got {len(users)}")
        most = min(MOST, self.num_items)
        k, exclude = given.get("k", min(20, most)), given.get("exclude_seen", True)
        if not is_number(k) or not 1 <= k <= most or int(k) != k:
            raise ValueError(f"the input has k {reprlib.repr(k)}: it must be an integer from 1 to {most}")
        if not isinstance(exclude, bool):
            raise ValueError(f"the input has exclude_seen {exclude!r}: it must be true or false")
        return Sample(users, k=int(k), exclude=exclude)

    def score(self, samples: Sequence[Sample], activated: Sequence[bool], place: Place) -> Scores:
        """See dlrm_v2.py. Scores are products of embeddings; `activated` has no effect."""
        given = [i for i, sample in enumerate(samples) if sample.items is not None]
        if len(given) == len(samples):
            return self._products(samples, place)
        if not given:
            return self._best(samples, place)
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = [(self.final[:0, 0], None)] * len(samples)
        parts = self._products([samples[i] for i in given], place)
        # A copy: the next graph may use the memory again
        for i, part in zip(given, parts.scores.clone().split(list(parts.sizes)), strict=True):
            found[i] = part, None
        wanted = [i for i, sample in enumerate(samples) if sample.items is None]
        best = self._best([samples[i] for i in wanted], place)
        for row, (i, n) in enumerate(zip(wanted, best.sizes, strict=True)):
            found[i] = best.scores[row, :n], best.ids[row, :n]
        return found

    def _products(self, samples: Sequence[Sample], place: Place) -> Together:
        """The products of users and their items."""
        each = _joined([s.counts for s in samples])
        users, items = [s.users for s in samples], [s.items for s in samples]
        sizes: list[int] = [len(ids) for ids in items]  # type: ignore[arg-type]
        if len(each) > 1 and (each != each[0]).any():
            at, rows, own = self._placed(place, users, items, [each])
            vectors = self.final.index_select(0, at).float().repeat_interleave(own, 0, output_size=len(rows))
            return Together((self.items.index_select(0, rows).float() * vectors).sum(-1), sizes)
        if self.graphs is None or sum(sizes) > GRAPHED:
            return Together(_dots(self.final, self.items, *self._placed(place, users, items)), sizes)
        count = int(each[0])
        # One user's items are padded, so that few graphs serve any number of them
        wide = len(each) * count if len(each) > 1 else next_power_of_2(count)
        ids, places = self._packed([users, items], [len(each), wide])
        final, of_items = self.final, self.items

        def compute(ids: torch.Tensor) -> torch.Tensor:
            return _dots(final, of_items, *(ids[part] for part in places))

        made = self.graphs(("products", len(each), wide, final.data_ptr()), compute, [place(ids)])
        return Together(made[: sum(sizes)], sizes)

    def _best(self, samples: Sequence[Sample], place: Place) -> Best:
        starts, users = self._seen_starts, _joined([s.users for s in samples])
        parts = [
            self._seen[starts[user] : starts[user + 1]] if s.exclude else self._seen[:0]
            for s, user in zip(samples, users, strict=True)
        ]
        counts, k = [len(part) for part in parts], max(s.k for s in samples)
        groups: list[Sequence[Any]] = [[users]]
        if any(counts):
            groups += [[np.cumsum([0, *counts])], parts]
        left = [min(s.k, self.num_items - n) for s, n in zip(samples, counts, strict=True)]
        final, items = self.final, self.items
        if self.graphs is None or len(users) * self.num_items > SCORES:
            at, *hidden = self._placed(place, *groups)
            best, found = top_k_scores(final.index_select(0, at), items, k, *hidden)
            return Best(best, found, left)
        # No user has the ids behind the last one's: seen items are padded, too
        wide = [len(users), len(users) + 1, next_power_of_2(max(sum(counts), LEAST))][: len(groups)]
        ids, places = self._packed(groups, wide)

        def compute(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at, *hidden = (ids[part] for part in places)
            return top_k_scores(final.index_select(0, at), items, k, *hidden)

        key = "best", k, len(users), len(groups), final.data_ptr()
        best, found = self.graphs(key, compute, [place(ids)])
        return Best(best, found, left)

    def _placed(self, place: Place, *groups: Sequence[Any]) -> list[torch.Tensor]:
        """The arrays of each group as one tensor of ids on the device. Small ones are copied there at once."""
        sizes = [sum(map(len, arrays)) for arrays in groups]
        if sum(sizes) >= LARGE and all(len(arrays) == 1 for arrays in groups):
            return [place(array.astype(self._ids, copy=False)) for (array,) in groups]
        ids, places = self._packed(groups, sizes)
        placed = place(ids)
        return [placed[part] for part in places]

    def _packed(
        self, groups: Sequence[Sequence[Any]], sizes: Sequence[int]
    ) -> tuple[np.ndarray, list[slice]]:
        """All groups as one array, and where each is in it. sizes: of the groups, those with zeros behind included."""
        # 16 bytes are 4 ids at most: kernels are compiled anew for tensors that begin elsewhere
        places, at = list[slice](), 0
        for size in sizes:
            places.append(slice(at, at + size))
            at += -(-size // 4) * 4
        ids = np.zeros(at, self._ids)
        for part, arrays in zip(places, groups, strict=True):
            joined = _joined(arrays)
            ids[part.start : part.start + len(joined)] = joined
        return ids, places


def _dots(users: torch.Tensor, items: torch.Tensor, of: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The products of users[of] with as many items[rows] each, in float32, one user's after the other's.

    users: [U, D]; items: [M, D]; of: [n]; rows: [n * items of a user]
    """
    vectors = users.index_select(0, of).float()
    found = items.index_select(0, rows).float().view(len(of), -1, items.shape[1])
    return (found * vectors[:, None]).sum(-1).view(-1)


def _joined(arrays: Sequence[Any]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _nested(items: Any) -> bool:
    """Whether these are items for each of several users."""
    return getattr(items, "ndim", 1) == 2 or (
        isinstance(items, (list, tuple)) and len(items) > 0 and hasattr(items[0], "__len__")
    )


def _read(file: Path, nodes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """edge_index [2, edges] and edge_weight of a file. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has no {file.name}: LightGCN needs `edge_index` [2, edges], the edges between its nodes"
        )
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    edges, weight = found.get("edge_index"), found.get("edge_weight")
    if edges is None or edges.dim() != 2 or len(edges) != 2 or edges.dtype != torch.int64:
        what = "no tensor" if edges is None else f"{list(edges.shape)} of {edges.dtype}"
        raise CheckpointError(f"{file}: edge_index must be [2, edges] of int64, got {what}")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        wrong = int(edges.min()) if int(edges.min()) < 0 else int(edges.max())
        raise CheckpointError(
            f"{file}: edge_index has the node {wrong}, and the model has {nodes}: 0 to {nodes - 1}"
        )
    if weight is not None and (weight.shape != edges.shape[1:] or not weight.is_floating_point()):
        raise CheckpointError(
            f"{file}: edge_weight must be [{edges.shape[1]}] of numbers, got {list(weight.shape)} of {weight.dtype}"
        )
    if weight is not None and not weight.isfinite().all():
        raise CheckpointError(f"{file} is damaged: NaN or infinity in edge_weight")
    return edges, None if weight is None else weight.float()


def _seen(edges: np.ndarray, users: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """The items of each user with an edge between them, in CSR: starts [users + 1], items."""
    both = np.concatenate((edges, edges[::-1]), 1)
    both = both[:, (both[0] < users) & (both[1] >= users)]
    pairs = np.unique(both[0] * items + both[1] - users)
    starts = np.searchsorted(pairs, np.arange(users + 1) * items)
    return starts.astype(np.int64), pairs % items


ARCH = Architecture(
    names=("LightGCN",),
    category="recsys",
    model="LightGCN",
    runner="Score",
    inputs="nodes",
    model_type="lightgcn",
    packed={},
    own_config="fastkernels.models.recsys.lightgcn:read_config",
)
