"""Drop-in modules for torchrec: the cross network of DLRM_DCN, and collections of embedding bags."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.modules import autocasts
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import addresses, embedding_bag, embedding_bags

# {collection: (its tables' addresses, their distances from the first, their rows)}
_places: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = (
    WeakKeyDictionary()
)


class TorchrecLowRankCrossNet(nn.Module):
    """LowRankCrossNet: input [B, in_features] to the same."""

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if low_rank < 1:
            raise ValueError(f"low_rank must be at least 1, got {low_rank}")
        self._num_layers, self._low_rank = num_layers, low_rank
        shapes = (in_features, low_rank), (low_rank, in_features)
        self.W_kernels, self.V_kernels = (
            nn.ParameterList(
                nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(num_layers)
            )
            for shape in shapes
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(in_features)) for _ in range(num_layers))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() != 2 or autocasts(input):
            return super(type(self), self).forward(input)
        x = input
        for i in range(self._num_layers):
            x = cross_low_rank(input, x, self.V_kernels[i], self.W_kernels[i], self.bias[i])
        return x


class TorchrecEmbeddingBagCollection(nn.Module):
    """EmbeddingBagCollection: a KeyedJaggedTensor to a KeyedTensor [B, sum of the features' dimensions] in float32.

    One kernel for tables of one dimension, dtype and pooling. An id beyond its table adds 0, without torch's error.
    """

    def __init__(
        self, tables: Sequence[Any], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._is_weighted, self._embedding_bag_configs = is_weighted, tables
        self.embedding_bags, self._lengths_per_embedding = nn.ModuleDict(), list[int]()
        for table in tables:
            if table.name in self.embedding_bags:
                raise ValueError(f"Duplicate table name {table.name}")
            self.embedding_bags[table.name] = bag = nn.EmbeddingBag(
                table.num_embeddings, table.embedding_dim, mode=table.pooling.name.lower(), device=device,
                include_last_offset=True, dtype=torch.float32 if table.data_type.name == "FP32" else torch.float16,
            )  # fmt: skip
            device = bag.weight.device if device is None else device
            if not table.feature_names:
                table.feature_names = [table.name]
            self._lengths_per_embedding += [table.embedding_dim] * len(table.feature_names)
        self._device = device or torch.device("cpu")
        self._feature_names = [table.feature_names for table in tables]
        shared = Counter(name for names in self._feature_names for name in names)
        self._embedding_names = [
            f"{name}@{table.name}" if shared[name] > 1 else name
            for table in tables for name in table.feature_names
        ]  # fmt: skip
        self.reset_parameters()

    def forward(self, features: Any) -> Any:
        if _special(features):
            return super(type(self), self).forward(features)
        wanted = [name for names in self._feature_names for name in names]
        keys = features.keys()
        if keys != wanted:
            features = features.permute([keys.index(name) for name in wanted])
        bags = list(self.embedding_bags.values())
        bags = [bag for bag, names in zip(bags, self._feature_names, strict=True) for _ in names]
        weights = features.weights() if self._is_weighted else None
        pooled = _pooled(self, bags, features.values(), features.offsets(), weights)
        made = sys.modules[type(features).__module__].KeyedTensor
        return made(
            keys=self._embedding_names, values=pooled, length_per_key=self._lengths_per_embedding
        )

    def is_weighted(self) -> bool:
        return self._is_weighted

    def embedding_bag_configs(self) -> Sequence[Any]:
        return self._embedding_bag_configs

    @property
    def device(self) -> torch.device:
        return self._device

    def reset_parameters(self) -> None:
        if torch.device(self._device).type == "meta":
            return
        for table in self._embedding_bag_configs:
            table.init_fn(self.embedding_bags[table.name].weight)


def _special(features: Any) -> bool:
    """Whether the input is no KeyedJaggedTensor, or one whose features have batches of several sizes."""
    if type(features).__name__ != "KeyedJaggedTensor" or features.variable_stride_per_key():
        return True
    return features.inverse_indices_or_none() is not None or not features.keys()


def _pooled(
    module: nn.Module, bags: Sequence[Any], ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    """The bags of all features [B, sum of dimensions] in float32, of features with these tables."""
    tables = [bag.weight for bag in bags]
    key = tuple(table.data_ptr() for table in tables)
    kept = _places.get(module)
    if kept is None or kept[0] != key:
        rows = torch.tensor([len(table) for table in tables], device=tables[0].device)
        kept = _places[module] = key, addresses(tables), rows
    _, places, rows = kept
    modes = [bag.mode == "mean" for bag in bags]
    if len(set(modes)) == 1:
        return embedding_bags(ids, offsets, tables, places, rows, weights, modes[0]).float()
    batch, zero = (len(offsets) - 1) // len(bags), torch.zeros_like(rows[:1])
    parts = [
        embedding_bag(
            ids, offsets[f * batch : (f + 1) * batch + 1], table, zero, rows[f : f + 1], weights, mean
        ).float()
        for f, (table, mean) in enumerate(zip(tables, modes, strict=True))
    ]  # fmt: skip
    return torch.cat(parts, 1)


TARGETS = {
    "cross_low_rank": (
        Target(
            "torchrec", "torchrec.modules.crossnet:LowRankCrossNet", "TorchrecLowRankCrossNet", "module"
        ),
    ),
    "embedding_bag": (
        Target(
            "torchrec", "torchrec.modules.embedding_modules:EmbeddingBagCollection",
            "TorchrecEmbeddingBagCollection", "module",
        ),
    ),
}  # fmt: skip
