"""Drop-in modules for torchrec: cross networks of four kinds, and collections of embedding bags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.overrides.recsys.cross_layer import cross_layer
from fastkernels.overrides.recsys.cross_low_rank import cross_low_rank
from fastkernels.overrides.recsys.embedding_bag import embedding_bag
from fastkernels.overrides.recsys.jagged import Jagged, pooled_at_once


def _parameters(count: int, *shape: int, zero: bool = False) -> nn.ParameterList:
    made = (torch.zeros(shape) if zero else nn.init.xavier_normal_(torch.empty(shape)) for _ in range(count))
    return nn.ParameterList(nn.Parameter(t) for t in made)


def _check_rows(input: torch.Tensor) -> None:
    if input.dim() != 2:
        raise UnsupportedArgument(f"the input has {input.dim()} dimensions, not 2")


class TorchrecLowRankCrossNet(nn.Module):
    """LowRankCrossNet: input [B, in_features] to the same."""

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if low_rank < 1:
            raise ValueError(f"low_rank must be at least 1, got {low_rank}")
        self._num_layers, self._low_rank = num_layers, low_rank
        self.W_kernels = _parameters(num_layers, in_features, low_rank)
        self.V_kernels = _parameters(num_layers, low_rank, in_features)
        self.bias = _parameters(num_layers, in_features, zero=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = first = input.reshape(-1, input.shape[-1])
        for i in range(self._num_layers):
            x = cross_low_rank(first, x, self.V_kernels[i], self.W_kernels[i], self.bias[i])
        return x.view(input.shape)


class TorchrecCrossNet(nn.Module):
    """CrossNet, of full rank: input [B, in_features] to the same."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _parameters(num_layers, in_features, in_features)
        self.bias = _parameters(num_layers, in_features, 1, zero=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _check_rows(input)
        x = input
        for i in range(self._num_layers):
            x = cross_layer(input, x, x[:, None], self.kernels[i][None], self.bias[i][:, 0])
        return x


class TorchrecVectorCrossNet(nn.Module):
    """VectorCrossNet, DCN v1: input [B, in_features] to the same. The bias is outside the product with the input."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _parameters(num_layers, in_features, 1)
        self.bias = _parameters(num_layers, in_features, 1, zero=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _check_rows(input)
        x, width = input, input.shape[1]
        one, none = input.new_ones(1, 1, 1).expand(1, width, 1), input.new_zeros(width)
        for i in range(self._num_layers):
            h = x @ self.kernels[i]  # [B, 1]
            x = cross_layer(input, x + self.bias[i][:, 0], h[:, None], one, none)
        return x


class TorchrecLowRankMixtureCrossNet(nn.Module):
    """LowRankMixtureCrossNet: input [B, in_features] to the same, by experts of low rank and their gates."""

    def __init__(
        self, in_features: int, num_layers: int, num_experts: int = 1, low_rank: int = 1,
        activation: nn.Module | Callable[[torch.Tensor], torch.Tensor] = torch.relu,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_experts < 1 or low_rank < 1:
            raise ValueError(f"num_experts and low_rank must be at least 1, got {num_experts} and {low_rank}")
        self._num_layers, self._num_experts = num_layers, num_experts
        self._low_rank, self._in_features = low_rank, in_features
        self.U_kernels = _parameters(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _parameters(num_layers, num_experts, low_rank, in_features)
        self.bias = _parameters(num_layers, in_features, 1, zero=True)
        gates = (nn.Linear(in_features, 1, bias=False) for _ in range(num_experts))
        self.gates = nn.ModuleList(gates) if num_experts > 1 else None
        self._activation = activation
        self.C_kernels = _parameters(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _check_rows(input)
        x, act = input, self._activation
        for i in range(self._num_layers):
            h = torch.einsum("bn,krn->kbr", x, self.V_kernels[i])
            h = torch.bmm(act(h), self.C_kernels[i].transpose(1, 2))
            h = act(h).transpose(0, 1)  # [B, K, R]
            if self.gates is not None:
                scores = torch.cat([gate(x) for gate in self.gates], 1)
                h = h * scores.softmax(1)[:, :, None]
            x = cross_layer(input, x, h.contiguous(), self.U_kernels[i], self.bias[i][:, 0])
        return x


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


def _cross(name: str) -> Target:
    return Target("torchrec", f"torchrec.modules.crossnet:{name}", f"Torchrec{name}", "module")


TARGETS = {
    "cross_low_rank": (_cross("LowRankCrossNet"),),
    "cross_layer": (_cross("CrossNet"), _cross("VectorCrossNet"), _cross("LowRankMixtureCrossNet")),
    "embedding_bag": (
        Target(
            "torchrec", "torchrec.modules.embedding_modules:EmbeddingBagCollection",
            "TorchrecEmbeddingBagCollection", "module",
        ),
    ),
}  # fmt: skip
