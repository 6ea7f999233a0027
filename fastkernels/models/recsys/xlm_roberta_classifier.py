"""XLM-RoBERTa with a classifier of its first token: cross-encoders such as BGE rerankers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.recsys.bert import BertModel
from fastkernels.models.recsys.xlm_roberta import XLMRobertaEmbeddings
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear


class XLMRobertaClassificationHead(nn.Module):
    """Two linear layers with a tanh: [B, H] to logits [B, num_labels]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = VllmReplicatedLinear(hidden, hidden, return_bias=False)
        self.out_proj = VllmReplicatedLinear(hidden, config.num_labels, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dense(x).tanh())


class XLMRobertaForSequenceClassification(BertModel):
    """config: transformers.XLMRobertaConfig with num_labels. Raises ValueError as BertModel does, and Unsupported."""

    embeddings_class = XLMRobertaEmbeddings

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.classifier = XLMRobertaClassificationHead(config)

    def classify(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Logits [B, num_labels] of B sequences that start at starts [B + 1]; hidden [T, H]."""
        return self.classifier(hidden.index_select(0, starts[:-1]))


ARCH = Architecture(
    names=("XLMRobertaForSequenceClassification",),
    category="recsys",
    model="XLMRobertaForSequenceClassification",
    runner="Encode",
    model_type="xlm-roberta",
    first_position="pad_token_id",
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"roberta.": ""},
    unused=("pooler.*", "embeddings.position_ids"),
)
