"""BERT with a classifier of its first token: cross-encoders such as MS MARCO's MiniLM rerankers."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.recsys.bert import BertModel
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear


class BertForSequenceClassification(BertModel):
    """config: transformers.BertConfig with num_labels. Raises ValueError as BertModel does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, self.num_labels = config.hidden_size, config.num_labels
        self.pooler = VllmReplicatedLinear(hidden, hidden, return_bias=False)
        self.classifier = VllmReplicatedLinear(hidden, self.num_labels, return_bias=False)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Logits [B, num_labels] of B sequences that start at starts [B + 1]; hidden [T, H]."""
        first = hidden.index_select(0, starts[:-1])
        return self.classifier(self.pooler(first).tanh())


ARCH = Architecture(
    names=("BertForSequenceClassification",),
    category="recsys",
    model="BertForSequenceClassification",
    runner="Encode",
    model_type="bert",
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"bert.pooler.dense.": "pooler.", "bert.": ""},
    unused=("embeddings.position_ids",),
)
