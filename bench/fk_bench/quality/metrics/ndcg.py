"""nDCG of a search in a fixed corpus."""

from __future__ import annotations

import torch.nn.functional as F

from fk_bench.quality.metrics.metric import Metric
from fk_bench.quality.metrics.outputs import Embeddings


class NDCG(Metric):
    name = "ndcg"
    formula = "mean over queries of nDCG@10 of documents by cosine; one document is relevant"
    unit = "nDCG"
    direction = "higher"
    families = ("embedding",)

    def value(self, output: Embeddings, reference: Embeddings) -> float:
        from torchmetrics.functional.retrieval import retrieval_normalized_dcg

        cosines = (
            F.normalize(output.queries.double(), dim=-1) @ F.normalize(output.documents.double(), dim=-1).T
        )
        relevant = F.one_hot(output.relevant, len(output.documents)).bool()  # [Q, N]
        found = [retrieval_normalized_dcg(c, r, top_k=10) for c, r in zip(cosines, relevant, strict=True)]
        return float(sum(found)) / len(found)
