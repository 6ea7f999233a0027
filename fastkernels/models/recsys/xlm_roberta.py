"""XLM-RoBERTa (Conneau et al., arXiv 1911.02116) as a text encoder: BGE-M3 with all its heads, multilingual E5."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.retrieval import Form, unit
from fastkernels.models.recsys.bert import BertEmbeddings, BertModel
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear

SPARSE, VECTORS = "sparse_linear.pt", "colbert_linear.pt"


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
    """config: transformers.XLMRobertaConfig. Raises ValueError as BertModel does, and Unsupported.

    It has the heads of BGE-M3 (Chen et al., arXiv 2402.03216) whose files config.heads names.
    """

    embeddings_class = XLMRobertaEmbeddings

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        heads, hidden = getattr(config, "heads", ()), config.hidden_size
        self.missing = {}
        if SPARSE in heads:
            self.sparse_linear = VllmReplicatedLinear(hidden, 1, return_bias=False)
        else:
            self.missing["token_classify"] = SPARSE
        if VECTORS in heads:
            size = getattr(config, "colbert_dim", None) or hidden
            self.colbert_linear = VllmReplicatedLinear(hidden, size, return_bias=False)
        else:
            self.missing["late_interaction"] = VECTORS

    def forms(self, tokenizer: Any) -> dict[str, Form]:
        """The forms of texts for `token_embed`; {} without the head. The first token's vector does not count."""
        return (
            {}
            if "late_interaction" in self.missing
            else dict.fromkeys(("", "query", "document"), Form(first=False))
        )

    def token_embed(self, hidden: torch.Tensor, normalize: bool = True) -> torch.Tensor:
        """Vectors for late interaction: hidden [T, H] to [T, D] float32. Without the head, the hidden states."""
        if "late_interaction" in self.missing:
            return hidden
        return unit(self.colbert_linear(hidden), normalize)

    def token_classify(self, hidden: torch.Tensor, activate: bool = True) -> torch.Tensor:
        """Lexical weights: hidden [T, H] to [T] float32."""
        weights = self.sparse_linear(hidden)[:, 0].float()
        return weights.relu() if activate else weights


ARCH = Architecture(
    names=("XLMRobertaModel",),
    category="recsys",
    model="XLMRobertaModel",
    runner="Encode",
    model_type="xlm-roberta",
    first_position="pad_token_id",
    heads={"sparse_linear.pt": "sparse_linear.", "colbert_linear.pt": "colbert_linear."},
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"roberta.": ""},
    unused=("pooler.*", "lm_head.*", "embeddings.position_ids"),
    public={
        "BAAI/bge-m3": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "vocab_size": 250002, "max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "position_embedding_type": "absolute",
        },
    },
)  # fmt: skip
