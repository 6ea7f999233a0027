"""Cosine of embeddings."""

from __future__ import annotations

import torch

from fk_bench.quality.metrics.metric import Metric, angle
from fk_bench.quality.metrics.outputs import Embeddings


class EmbeddingCosine(Metric):
    name = "embedding_cosine"
    formula = "mean of cos(output, reference) over queries and documents"
    unit = "cosine"
    direction = "higher"
    families = ("embedding",)

    def value(self, output: Embeddings, reference: Embeddings) -> float:
        mine, wanted = (torch.cat((x.queries, x.documents)).double() for x in (output, reference))
        return float(torch.cosine_similarity(mine, wanted, dim=-1).mean())

    def discrepancy(self, value: float, output: Embeddings, reference: Embeddings) -> float:
        return angle(value)
