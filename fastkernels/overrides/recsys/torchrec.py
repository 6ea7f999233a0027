"""Drop-in modules for torchrec: the cross network of DLRM_DCN, and collections of embedding bags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import embedding_bag
from fastkernels.overrides.recsys.jagged import Jagged, pooled_at_once


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
        x = first = input.reshape(-1, input.shape[-1])
        for i in range(self._num_layers):
            x = cross_low_rank(first, x, self.V_kernels[i], self.W_kernels[i], self.bias[i])
        return x.view(input.shape)


class TorchrecEmbeddingBagCollection(nn.Module):
    """EmbeddingBagCollection: a KeyedJaggedTensor to a KeyedTensor [B, sum of the features' dimensions] in float32.

    One kernel for tables of one dimension, dtype and pooling. On a GPU an id beyond its table adds 0, without torch's
    error: a check would wait for the GPU.
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
        jagged = Jagged.of(self, features)
        pooled = pooled_at_once(embedding_bag, jagged)
        if pooled is not None:
            return jagged.result(pooled)
        parts, found = [], jagged.bags()
        if any(bags.beyond for bags in found):
            raise UnsupportedArgument("an id is beyond its table")
        for bags in found:
            weight, weights = bags.table.weight, bags.weights
            part = embedding_bag(bags.ids, bags.offsets, weight, bags.start, bags.rows, weights, bags.mean)
            parts.append(part if bags.spread is None else part[bags.spread])
        return jagged.result(parts)

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
