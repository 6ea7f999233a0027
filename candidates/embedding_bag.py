"""Bags of embeddings over many tables (DLRM, arXiv 1906.00091): sums or means of the rows that jagged ids name.

A candidate for the op embedding_bag. Judge it with:
    fk-bench kernels embedding_bag --candidate candidates/
It is correct as it is, and slow.
The function runs wherever the op runs. A class runs where a model has a module of that name.
Change the bodies; keep names, arguments, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastkernels.overrides.recsys import embedding_bag as ours, torchrec as ours_torchrec
from fastkernels.overrides.recsys.jagged import Jagged, pooled_at_once


def embedding_bag(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    table_starts: torch.Tensor,
    table_rows: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
    mean: bool = False,
) -> torch.Tensor:
    """The reference's docstring:

    indices: [N] int; offsets: [F * B + 1] int; weight: [rows, D]. Returns [B, F * D] in weight's dtype.

    Bag f * B + b holds the ids offsets[f * B + b] to offsets[f * B + b + 1] of feature f in sample b, as in torchrec's
    KeyedJaggedTensor. The table of feature f is table_rows[f] rows of weight from row table_starts[f] on, both [F]
    int64. Features may share a table.

    A bag is the sum of its rows, times per_sample_weights [N] if there are any, or with `mean` their mean. A bag
    without ids is 0. An id beyond its table adds 0, and counts in a mean. Computed in float32 or float64. Raises
    ValueError for shapes that do not fit, and for a mean with weights.

    In the case one (tables=(1,), batch=1, ids=1, dim=1):
        indices             int64 [1]
        offsets             int64 [2]
        weight              float32 [1, 1]
        table_starts        int64 [1]
        table_rows          int64 [1]
        per_sample_weights  None
        mean                False
        returns             float32 [1, 1]
    """
    return ours.reference(indices, offsets, weight, table_starts, table_rows, per_sample_weights, mean)


class TorchrecEmbeddingBagCollection(ours_torchrec.TorchrecEmbeddingBagCollection):
    """EmbeddingBagCollection: a KeyedJaggedTensor to a KeyedTensor [B, sum of the features' dimensions] in float32.

    One kernel for tables of one dimension, dtype and pooling. An id beyond its table adds 0, without torch's error.
    """

    def __init__(
        self, tables: Sequence[Any], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__(tables, is_weighted, device)

    def forward(self, features: Any) -> Any:
        jagged = Jagged.of(self, features)
        pooled = pooled_at_once(embedding_bag, jagged)
        if pooled is not None:
            return jagged.result(pooled)
        parts = []
        for bags in jagged.bags():
            weight, weights = bags.table.weight, bags.weights
            part = embedding_bag(bags.ids, bags.offsets, weight, bags.start, bags.rows, weights, bags.mean)
            parts.append(part if bags.spread is None else part[bags.spread])
        return jagged.result(parts)
