"""XLM-RoBERTa (Conneau et al., arXiv 1911.02116) as a text encoder: BGE-M3, multilingual E5."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.models.common.architecture import Architecture
from fastkernels.models.common.description import Unsupported
from fastkernels.models.recsys.bert import BertEmbeddings, BertModel


class XLMRobertaEmbeddings(BertEmbeddings):
    """BERT's embeddings, with positions that begin behind padding_idx: the first token has padding_idx + 1."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if type(config.pad_token_id) is not int or config.pad_token_id < 0:
            raise Unsupported(
                f"config.pad_token_id={config.pad_token_id!r} is not supported, only integers of at least 0: positions"
                " begin behind it"
            )
        self.padding_idx = config.pad_token_id

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(input_ids, positions + (self.padding_idx + 1), token_type_ids)


class XLMRobertaModel(BertModel):
    """config: transformers.XLMRobertaConfig. Raises ValueError as BertModel does, and Unsupported."""

    embeddings_class = XLMRobertaEmbeddings


ARCH = Architecture(
    names=("XLMRobertaModel",),
    category="recsys",
    model="XLMRobertaModel",
    runner="Encode",
    model_type="xlm-roberta",
    first_position="pad_token_id",
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"roberta.": ""},
    unused=("pooler.*", "lm_head.*", "embeddings.position_ids"),
)
