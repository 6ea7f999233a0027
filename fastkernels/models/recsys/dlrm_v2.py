"""DLRMv2 (arXiv 1906.00091 with the cross network of arXiv 2008.13535): clicks, torchrec's DLRM_DCN.

Every model of the runner Score has this interface: read(given) returns the checked sample of a request, with the number
of its ids as `size`, and raises ValueError, whose message begins with "the input". score(samples, activated, place)
returns for each sample its scores [n], and the ids that they belong to or None, on the model's device; place(array)
puts a numpy array there. ready(folder, dummy) is called once the weights are loaded, and refresh() after the model's
code has changed. On a GPU, the runner gives `graphs` to a model that has this field: shapes that come again run in CUDA
graphs.

config.json is ours, as torchrec has none:

    {"architectures": ["DLRM_DCN"], "model_type": "dlrm_dcn", "dtype": "float32", "dense_in_features": 13,
     "tables": [{"name": "t_cat_0", "num_embeddings": 40000000, "feature_names": ["cat_0"]}, ...],
     "embedding_dim": 128, "pooling": "sum", "dense_arch_layer_sizes": [512, 256, 128],
     "over_arch_layer_sizes": [1024, 1024, 512, 256, 1], "dcn_num_layers": 3, "dcn_low_rank_dim": 512}

Fields that are left out are those of MLPerf's model, which this is. Features are in the order of the tables, and of a
table's feature_names, whose default is its name.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import ROWS, embedding_bag

Place: TypeAlias = Callable[[np.ndarray], torch.Tensor]
Scores: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor | None]]"
NUMBERS = ("dense_in_features", "embedding_dim", "dcn_num_layers", "dcn_low_rank_dim")
SIZES = ("dense_arch_layer_sizes", "over_arch_layer_sizes")
POOLING = ("sum", "mean")
FEW = 16  # ids that are checked one after the other
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
    """One impression: dense [dense_in_features] float32, ids int64 of all features in order, and their numbers."""

    dense: np.ndarray
    ids: np.ndarray
    lengths: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.ids)


def by_feature(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """(indices, offsets) of embedding_bag: the bags of the first feature of all samples, then those of the next."""
    lengths = np.array([sample.lengths for sample in samples], np.int64)  # [B, F]
    ids = np.concatenate([sample.ids for sample in samples])
    count = lengths.shape[1]
    if (lengths == lengths[0, 0]).all():
        ids = ids.reshape(*lengths.shape, lengths[0, 0]).swapaxes(0, 1).ravel()
    else:
        of = np.repeat(np.tile(np.arange(count), len(samples)), lengths.ravel())
        ids = ids[np.argsort(of, kind="stable")]
    return ids, np.concatenate(([0], lengths.T.ravel().cumsum()))


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
        self.dense_size: int = config.dense_in_features
        self.places = {name: i for i, (name, _, _) in enumerate(self.features)}
        self.counts = np.array([rows for _, _, rows in self.features])
        self.graphs: Any = None  # ForwardGraphs, of the runner
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

        A feature that is not given has no ids.
        """
        if (found := self._plain(given)) is not None:
            return found
        fields(given, ("dense", "sparse"))
        dense, sparse = given.get("dense"), given.get("sparse", {})
        if not isinstance(dense, (list, tuple, np.ndarray)) or len(dense) != self.dense_size:
            raise ValueError(
                f"the input needs `dense`, a list of {self.dense_size} numbers, got {reprlib.repr(dense)}"
            )
        wrong = next((v for v in dense if not is_number(v) or not abs(v) <= LARGEST), None)
        if wrong is not None:
            raise ValueError(
                f"the input has {reprlib.repr(wrong)} in `dense`, which is no finite number in float32"
            )
        if not isinstance(sparse, Mapping):
            raise ValueError(f"the input needs `sparse`, ids by feature, got {reprlib.repr(sparse)}")
        names = [name for name, _, _ in self.features]
        if unknown := [name for name in sparse if name not in names]:
            raise ValueError(f"the input has the unknown feature {unknown[0]!r}; known: {', '.join(names)}")
        ids = [
            ids_of(sparse.get(name, ()), f"feature {name!r}", rows, f"table {table!r}")
            for name, table, rows in self.features
        ]
        return Sample(np.asarray(dense, np.float32), np.concatenate(ids), [len(i) for i in ids])

    def _plain(self, given: Any) -> Sample | None:
        """The sample of an input of Python's own types, checked at once; None for others, and for wrong ones."""
        if type(given) is not dict or given.keys() != {"dense", "sparse"}:
            return None
        dense, sparse = given["dense"], given["sparse"]
        if type(dense) is not list or type(sparse) is not dict or not sparse.keys() <= self.places.keys():
            return None
        bags = [sparse.get(name, ()) for name in self.places]
        if not {*map(type, bags)} <= {list, tuple} or not {*map(type, dense)} <= {int, float}:
            return None
        lengths, flat = [*map(len, bags)], [*itertools.chain.from_iterable(bags)]
        if not {*map(type, flat)} <= {int} or len(dense) != self.dense_size:
            return None
        try:
            ids, numbers = np.array(flat, np.int64), np.array(dense, np.float64)
        except OverflowError:
            return None
        inside = (ids >= 0) & (ids < np.repeat(self.counts, lengths))
        if not inside.all() or not (np.abs(numbers) <= LARGEST).all():
            return None
        return Sample(numbers.astype(np.float32), ids, lengths)

    def score(self, samples: Sequence[Sample], activated: Sequence[bool], place: Place) -> Scores:
        """See the module's docstring. One score each: the probability of a click, or not activated its logit."""
        indices, offsets = by_feature(samples)
        dense = place(np.stack([sample.dense for sample in samples]))
        dtype = self.sparse_arch.embedding_bag_collection.stacked.dtype
        inputs = [dense.to(dtype), place(indices), place(offsets)]
        logits = (self(*inputs) if self.graphs is None else self.graphs("forward", self, inputs)).float()
        made = torch.where(place(np.array(activated))[:, None], logits.sigmoid(), logits)
        return [(row, None) for row in made]


def fields(given: Any, known: Sequence[str]) -> None:
    """Raise ValueError for an input that is no table of these fields."""
    if not isinstance(given, Mapping):
        raise ValueError(f"the input must be an object with {', '.join(known)}, got {reprlib.repr(given)}")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"the input has the unknown field {unknown[0]!r}; known: {', '.join(known)}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def ids_of(given: Any, what: str, count: int, where: str) -> np.ndarray:
    """One id, or a list of them, as int64. Raises ValueError for what is no id of `where`, which has `count`."""
    listed = list(given) if isinstance(given, (list, tuple, np.ndarray)) else [given]
    if len(listed) > FEW and {*map(type, listed)} <= {int}:
        try:
            found = np.array(listed, np.int64)
        except OverflowError:
            found = np.array([-1])
        if found.min() >= 0 and found.max() < count:
            return found
    for value in listed:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise ValueError(f"the input has {reprlib.repr(value)} as an id of {what}, which is no integer")
        if not 0 <= value < count:
            raise ValueError(
                f"the input has the id {value} of {what}, and {where} has {count} rows: 0 to {count - 1}"
            )
    return np.array(listed, np.int64)


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
