"""DLRMv2 (arXiv 1906.00091 with the cross network of arXiv 2008.13535): clicks, torchrec's DLRM_DCN.

Every model of the runner Score has this interface: read(given) returns the checked sample of a request, with the number
of its ids as `size`, and raises ValueError, whose message begins with "the input". score(samples, activated, place)
returns for each sample its scores [n], and the ids that they belong to or None, on the model's device, or the scores
of all samples together (samples.Together); place(array) puts a numpy array there. ready(folder, dummy) is called once
the weights are loaded, and refresh() after the model's code has changed. A model with an attribute `graphs` gets the
runner's CUDA graphs there, or None.

config.json is ours, as torchrec has none:

    {"architectures": ["DLRM_DCN"], "model_type": "dlrm_dcn", "dtype": "float32", "dense_in_features": 13,
     "tables": [{"name": "t_cat_0", "num_embeddings": 40000000, "feature_names": ["cat_0"]}, ...],
     "embedding_dim": 128, "pooling": "sum", "dense_arch_layer_sizes": [512, 256, 128],
     "over_arch_layer_sizes": [1024, 1024, 512, 256, 1], "dcn_num_layers": 3, "dcn_low_rank_dim": 512}

Fields that are left out are those of MLPerf's model, which this is. Features are in the order of the tables, and of a
table's feature_names, whose default is its name.
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

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.samples import (
    Graphs,
    Place,
    Scores,
    Together,
    as_given,
    fields,
    ids_of,
    integers,
    is_number,
    rows_of,
)
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import ROWS, embedding_bag

NUMBERS = ("dense_in_features", "embedding_dim", "dcn_num_layers", "dcn_low_rank_dim")
SIZES = ("dense_arch_layer_sizes", "over_arch_layer_sizes")
POOLING = ("sum", "mean")
GRAPHED = 4096  # rows of a step that run in a CUDA graph; more keep the GPU busy without one
LARGEST = float(np.finfo(np.float32).max)
DEFAULTS: dict[str, Any] = {  # MLPerf's model for Criteo's data
    "dense_in_features": 13, "embedding_dim": 128, "pooling": "sum", "dense_arch_layer_sizes": [512, 256, 128],
    "over_arch_layer_sizes": [1024, 1024, 512, 256, 1], "dcn_num_layers": 3, "dcn_low_rank_dim": 512,
    "tables": [
        {"name": f"t_cat_{i}", "num_embeddings": rows, "feature_names": [f"cat_{i}"]} for i, rows in enumerate(ROWS)
    ],
}  # fmt: skip


def positive(raw: Mapping[str, Any], name: str) -> int:
    """A field of a config that is an integer above 0. Raises Unsupported."""
    value = raw.get(name)
    if type(value) is not int or value < 1:
        raise Unsupported(f"config.{name}={value!r} is not supported, only integers above 0")
    return value


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    raw = made = {**DEFAULTS, **raw}
    for name in NUMBERS:
        positive(raw, name)
    for name in SIZES:
        sizes = raw.get(name)
        if not isinstance(sizes, list) or not sizes or any(type(n) is not int or n < 1 for n in sizes):
            raise Unsupported(f"config.{name}={sizes!r} is not supported, only a list of integers above 0")
    if made["pooling"] not in POOLING:
        raise Unsupported(f"config.pooling={made['pooling']!r} is not one of {', '.join(POOLING)}")
    if raw["dense_arch_layer_sizes"][-1] != raw["embedding_dim"]:
        raise Unsupported(
            f"config.dense_arch_layer_sizes={raw['dense_arch_layer_sizes']!r} must end with embedding_dim"
            f" {raw['embedding_dim']}: the dense features become one more vector"
        )
    if raw["over_arch_layer_sizes"][-1] != 1:
        raise Unsupported(f"config.over_arch_layer_sizes={raw['over_arch_layer_sizes']!r} must end with 1")
    tables = raw.get("tables")
    if not isinstance(tables, list) or not tables:
        raise Unsupported(f"config.tables={tables!r} is not a list of tables")
    made["tables"] = [_table(table) for table in tables]
    for what, names in (
        ("table", [t["name"] for t in made["tables"]]),
        ("feature", [n for t in made["tables"] for n in t["feature_names"]]),
    ):
        if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
            raise Unsupported(f"config.tables has the {what} {twice[0]!r} twice")
    return made


def _table(table: Any) -> dict[str, Any]:
    name, rows = (table.get(n) if isinstance(table, dict) else None for n in ("name", "num_embeddings"))
    names = table.get("feature_names") or [name] if isinstance(table, dict) else []
    known = isinstance(name, str) and name and "." not in name and type(rows) is int and rows > 0
    if not known or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise Unsupported(
            f"config.tables: {reprlib.repr(table)} is not a table with `name`, `num_embeddings` above 0, and"
            " optionally `feature_names`"
        )
    return {"name": name, "num_embeddings": rows, "feature_names": names}


class Table(nn.Module):
    """One table: a part of the tensor that holds all of them."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows)


class EmbeddingBagCollection(nn.Module):
    """Jagged ids to [B, F * D]: the bags of all features, in one call."""

    ops = ("embedding_bag",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows = [table["num_embeddings"] for table in config.tables]
        starts = [sum(rows[:i]) for i in range(len(rows))]
        # No parameter, as checkpoints have one for each table: those are its parts.
        self.stacked = torch.empty(sum(rows), config.embedding_dim)
        self.embedding_bags = nn.ModuleDict(
            {
                table["name"]: Table(self.stacked[start : start + n])
                for table, start, n in zip(config.tables, starts, rows, strict=True)
            }
        )
        self.mean = config.pooling == "mean"
        features = [
            (s, n) for t, s, n in zip(config.tables, starts, rows, strict=True) for _ in t["feature_names"]
        ]
        self.register_buffer("starts", torch.tensor([s for s, _ in features]), persistent=False)
        self.register_buffer("rows", torch.tensor([n for _, n in features]), persistent=False)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return embedding_bag(indices, offsets, self.stacked, self.starts, self.rows, None, self.mean)


class Perceptron(nn.Module):
    """relu(x W^T + b)."""

    ops = ("linear",)

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self._linear = nn.Linear(size, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._linear.weight, self._linear.bias).relu_()


class MLP(nn.Module):
    """Perceptrons in a row."""

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self._mlp = nn.Sequential(
            *(Perceptron(a, b) for a, b in zip([size, *sizes], sizes, strict=False))
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mlp(x)


class SparseArch(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding_bag_collection = EmbeddingBagCollection(config)


class DenseArch(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = MLP(config.dense_in_features, config.dense_arch_layer_sizes)


class LowRankCrossNet(nn.Module):
    """The cross layers: x [B, N] to the same."""

    ops = ("cross_low_rank",)

    def __init__(self, size: int, layers: int, rank: int) -> None:
        super().__init__()
        self.W_kernels = nn.ParameterList(nn.Parameter(torch.empty(size, rank)) for _ in range(layers))
        self.V_kernels = nn.ParameterList(nn.Parameter(torch.empty(rank, size)) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.empty(size)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for v, w, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            x = cross_low_rank(first, x, v, w, bias)
        return x


class InteractionDCNArch(nn.Module):
    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        self.crossnet = LowRankCrossNet(size, config.dcn_num_layers, config.dcn_low_rank_dim)


class OverArch(nn.Module):
    """Vectors [B, N] to logits [B, 1]."""

    def __init__(self, size: int, sizes: Sequence[int]) -> None:
        super().__init__()
        inner = sizes[-2] if len(sizes) > 1 else size
        self.model = nn.Sequential(MLP(size, sizes[:-1]), nn.Linear(inner, sizes[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.model[1]
        return linear(self.model[0](x), last.weight, last.bias)


@dataclass(frozen=True)
class Sample:
    """Impressions: dense [rows, dense_in_features] float32, ids feature by feature, their counts [features, rows]."""

    dense: np.ndarray
    ids: np.ndarray
    counts: np.ndarray

    @property
    def size(self) -> int:
        """The number of ids, at least one for each impression: its dense features take memory, too."""
        return max(len(self.ids), len(self.dense))


class DLRM_DCN(nn.Module):
    """config: the fields of read_config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # (feature, its table's name, rows)
        self.features = [
            (name, table["name"], table["num_embeddings"])
            for table in config.tables
            for name in table["feature_names"]
        ]
        self.graphs: Graphs | None = None
        self._names = {name: None for name, _, _ in self.features}
        self._rows = np.array([rows for _, _, rows in self.features])
        self.dense_size: int = config.dense_in_features
        size = (len(self.features) + 1) * config.embedding_dim
        self.sparse_arch, self.dense_arch = SparseArch(config), DenseArch(config)
        self.inter_arch = InteractionDCNArch(config, size)
        self.over_arch = OverArch(size, config.over_arch_layer_sizes)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """dense: [B, dense_in_features]; indices, offsets: those of embedding_bag. Returns logits [B, 1]."""
        vectors = self.sparse_arch.embedding_bag_collection(indices, offsets)
        x = torch.cat((self.dense_arch.model(dense), vectors), 1)
        return self.over_arch(self.inter_arch.crossnet(x))

    def ready(self, folder: Path, dummy: bool) -> None:
        """See the module's docstring."""

    def refresh(self) -> None:
        """See the module's docstring."""

    def read(self, given: Any) -> Sample:
        """See the module's docstring. given: {"dense": [numbers], "sparse": {feature: id or [ids]}}.

        A feature that is not given has no ids. Several impressions in one input: `dense` [rows][numbers], and for each
        feature a list with an id or a list of ids for each row; arrays [rows] and [rows, n] are read fastest.
        """
        fields(given, ("dense", "sparse"))
        dense, sparse = as_given(given.get("dense")), given.get("sparse", {})
        many = (
            isinstance(dense, (list, tuple, np.ndarray)) and len(dense) > 0 and hasattr(dense[0], "__len__")
        )
        made = self._dense(dense, many)
        if not isinstance(sparse, Mapping):
            raise ValueError(f"the input needs `sparse`, ids by feature, got {reprlib.repr(sparse)}")
        if unknown := [name for name in sparse if name not in self._names]:
            known = ", ".join(self._names)
            raise ValueError(f"the input has the unknown feature {unknown[0]!r}; known: {known}")
        if not many and (quick := self._one(sparse)) is not None:
            return Sample(made, *quick)
        ids, counts = [], []
        for name, table, rows in self.features:
            where = f"feature {name!r}", rows, f"table {table!r}"
            if name not in sparse:
                found, each = np.empty(0, np.int64), np.zeros(len(made), np.int64)
            elif many:
                found, each = rows_of(sparse[name], len(made), *where)
            else:
                found = ids_of(sparse[name], *where)
                each = np.array([len(found)])
            ids.append(found)
            counts.append(each)
        return Sample(made, np.concatenate(ids), np.stack(counts))

    def _dense(self, dense: Any, many: bool) -> np.ndarray:
        rows = dense if many else [dense]
        plain = isinstance(rows, np.ndarray) and rows.dtype.kind in "fiu"
        for row in rows[:1] if plain else rows:
            known = isinstance(row, (list, tuple, np.ndarray)) and getattr(row, "ndim", 1) == 1
            if not known or len(row) != self.dense_size:
                raise ValueError(
                    f"the input needs `dense`, a list of {self.dense_size} numbers, got {reprlib.repr(row)}"
                )
        if plain or all({*map(type, row)} <= {int, float} for row in rows):
            try:
                made = np.array(rows, np.float64)
            except OverflowError:  # an integer of more than 1,024 bits
                made = np.array(np.nan)
            if (np.abs(made) <= LARGEST).all():
                return made.astype(np.float32)
        wrong = (v for row in rows for v in row if not is_number(v) or not abs(v) <= LARGEST)
        if (found := next(wrong, None)) is not None:
            raise ValueError(
                f"the input has {reprlib.repr(found)} in `dense`, which is no finite number in float32"
            )
        return np.array(rows, np.float32)

    def _one(self, sparse: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids and counts of one row of Python's integers; None if a value needs a closer look."""
        flat: list[Any] = []
        counts = []
        for name in self._names:
            value = sparse.get(name, ())
            if type(value) is int:
                flat.append(value)
                counts.append(1)
            elif type(value) in (list, tuple):
                flat += value
                counts.append(len(value))
            elif isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
                flat += value.tolist()
                counts.append(len(value))
            else:
                return None
        found, each = integers(flat), np.array(counts)
        if found is None or (found < 0).any() or (found >= np.repeat(self._rows, each)).any():
            return None
        return found, each[:, None]

    def score(self, samples: Sequence[Sample], activated: Sequence[bool], place: Place) -> Scores:
        """See the module's docstring. A score for each row: the probability of a click, or not activated its logit."""
        sizes = [len(sample.dense) for sample in samples]
        dense = np.concatenate([sample.dense for sample in samples])
        counts = np.concatenate([sample.counts for sample in samples], 1)
        ids = np.concatenate([sample.ids for sample in samples])
        if len(samples) > 1:  # feature by feature over all samples
            features = np.arange(len(counts))
            own = [np.repeat(features, sample.counts.sum(1)) for sample in samples]
            ids = ids[np.argsort(np.concatenate(own), kind="stable")]
        rows, graphs = len(dense), self.graphs
        if graphs is not None and rows <= GRAPHED:  # sizes that few graphs serve
            dense = _padded(dense, rows)
            counts = _padded(counts.T, rows).T
            ids = _padded(ids, len(ids))
        ends = np.concatenate(([0], np.cumsum(counts.ravel())))
        dtype = self.sparse_arch.embedding_bag_collection.stacked.dtype
        inputs = place(dense).to(dtype), place(ids), place(ends)
        if graphs is not None and rows <= GRAPHED:
            made = graphs("scores", self, inputs)[:rows].float()
        else:
            made = self(*inputs).float()
        if all(activated):
            made = made.sigmoid()
        elif any(activated):
            made = torch.where(place(np.repeat(activated, sizes))[:, None], made.sigmoid(), made)
        return Together(made[:, 0], sizes)


def _padded(array: np.ndarray, n: int) -> np.ndarray:
    """With rows of zeros up to a power of two, for n rows."""
    return np.concatenate((array, np.zeros((next_power_of_2(max(n, 1)) - n, *array.shape[1:]), array.dtype)))


ARCH = Architecture(
    names=("DLRM_DCN",),
    category="recsys",
    model="DLRM_DCN",
    runner="Score",
    inputs="samples",
    model_type="dlrm_dcn",
    packed={},
    prefixes={"model.": ""},  # of DLRMTrain, which holds the model that it trains
    own_config="fastkernels.models.recsys.dlrm_v2:read_config",
)
