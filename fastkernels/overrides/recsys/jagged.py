"""Inputs and results of torchrec's collections of embedding bags, and one kernel over their separate tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastkernels.core.dispatch import functional
from fastkernels.overrides.recsys.embedding_bag import launch, supports_triton

# {collection: (its tables' addresses, their distances from the first, their rows)}
_places: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Bags:
    """The bags of one feature: ids [N], offsets [B + 1], weights [N] or None, and the table's nn.EmbeddingBag.

    spread: the bag of each sample, where samples share bags; None: each has its own
    """

    table: Any
    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    spread: torch.Tensor | None = None

    @property
    def mean(self) -> bool:
        return self.table.mode == "mean"

    @property
    def start(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self.table.weight.device)

    @property
    def rows(self) -> torch.Tensor:
        return self.start + len(self.table.weight)

    @property
    def beyond(self) -> bool:
        """Whether an id is beyond the table. False without a look at the ids on a GPU and in compiled code."""
        if self.ids.device.type != "cpu" or torch.compiler.is_compiling() or not self.ids.numel():
            return False
        ids = self.ids[int(self.offsets[0]) : int(self.offsets[-1])]
        return bool(((ids < 0) | (ids >= len(self.table.weight))).any())


@dataclass(frozen=True)
class Jagged:
    """The features of a call in the collection's order; whole: its KeyedJaggedTensor, if they have the same samples."""

    module: Any
    whole: Any
    features: Any
    tables: Sequence[Any]
    names: Sequence[str]

    @staticmethod
    def of(module: Any, features: Any) -> Jagged:
        """features: a KeyedJaggedTensor, or a TensorDict. Raises what torchrec raises for a feature that is missing."""
        if type(features).__name__ == "TensorDict":
            features = sys.modules["torchrec.sparse.tensor_dict"].maybe_td_to_kjt(features, None)
        names = [name for names in module._feature_names for name in names]
        pairs = zip(module.embedding_bags.values(), module._feature_names, strict=True)
        tables = [table for table, names in pairs for _ in names]
        whole = None
        if not features.variable_stride_per_key() and features.inverse_indices_or_none() is None:
            keys = features.keys()
            if missing := [name for name in names if name not in keys]:
                raise KeyError(missing[0])
            whole = features if keys == names else features.permute([keys.index(name) for name in names])
        return Jagged(module, whole, features, tables, names)

    def bags(self) -> list[Bags]:
        """Feature by feature."""
        weighted, inverse = self.module._is_weighted, self.features.inverse_indices_or_none()
        if self.whole is not None:
            ids, offsets = self.whole.values(), self.whole.offsets()
            weights, batch = self.whole.weights() if weighted else None, (len(offsets) - 1) // len(self.names)
            cuts = [offsets[f * batch : (f + 1) * batch + 1] for f in range(len(self.names))]
            return [Bags(table, ids, cut, weights) for table, cut in zip(self.tables, cuts, strict=True)]
        found = self.features.to_dict()
        spread = {} if inverse is None else dict(zip(*inverse, strict=True))
        return [
            Bags(
                table, found[name].values(), found[name].offsets(), found[name].weights() if weighted else None,
                spread.get(name),
            )
            for table, name in zip(self.tables, self.names, strict=True)
        ]  # fmt: skip

    def result(self, pooled: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """The KeyedTensor in float32 of all features' bags [B, D], or of them side by side."""
        values = pooled if isinstance(pooled, torch.Tensor) else torch.cat([p.float() for p in pooled], 1)
        made = sys.modules[type(self.features).__module__].KeyedTensor
        module = self.module
        return made(
            keys=module._embedding_names, values=values.float(), length_per_key=module._lengths_per_embedding
        )


def pooled_at_once(op: Any, jagged: Jagged) -> torch.Tensor | None:
    """The bags of all features [B, F * D] by one kernel over the tables where they are; None: it does not apply.

    op: embedding_bag, which counts the call. The kernel is for tables on a GPU of one dimension, dtype and pooling.
    """
    tables = [table.weight for table in jagged.tables]
    first, modes = tables[0], {table.mode for table in jagged.tables}
    kind = first.stride(), first.shape[1], first.dtype
    alike = len(modes) == 1 and all((t.stride(), t.shape[1], t.dtype) == kind for t in tables)
    if not first.is_cuda or jagged.whole is None or not alike or op.requested:
        return None
    key = tuple(table.data_ptr() for table in tables)
    kept = _places.get(jagged.module)
    if kept is None or kept[0] != key:
        distances = [(place - key[0]) // first.element_size() for place in key]
        rows = [len(table) for table in tables]
        made = [torch.tensor(values, dtype=torch.int64, device=first.device) for values in (distances, rows)]
        kept = _places[jagged.module] = key, made[0], made[1]
    weights = jagged.whole.weights() if jagged.module._is_weighted else None
    given = jagged.whole.values(), jagged.whole.offsets(), first, kept[1], kept[2], weights, modes == {"mean"}
    if supports_triton(*given) is not None:
        return None
    op.count_call()
    return _separate(*given[:2], tables, *given[3:])


def _launched(
    indices: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor], places: torch.Tensor,
    rows: torch.Tensor, per_sample_weights: torch.Tensor | None, mean: bool,
) -> torch.Tensor:  # fmt: skip
    return launch(indices, offsets, weights[0], places, rows, per_sample_weights, mean, addresses=True)


_separate = functional(
    "embedding_bags(Tensor indices, Tensor offsets, Tensor[] weights, Tensor places, Tensor rows,"
    " Tensor? per_sample_weights, bool mean) -> Tensor",
    _launched,
    lambda indices, offsets, weights, *_: weights[0].new_empty(
        (offsets.shape[0] - 1) // len(weights), sum(w.shape[1] for w in weights)
    ),
)
