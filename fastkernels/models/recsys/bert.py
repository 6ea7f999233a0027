"""BERT (Devlin et al., arXiv 1810.04805) as a text encoder: MiniLM, BGE, E5 and other sentence embedders.

Every text encoder has this interface: model(input_ids [T], positions [T], token_type_ids [T] or None) returns hidden
states [T, H]. The sequences' bounds come from fastkernels.core.forward_context; the engine pools.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers import activation_modules
from fastkernels.models.common.layers.encoder import attend_within
from fastkernels.overrides.embedding.embedding import embedding
from fastkernels.overrides.embedding.vllm import VllmVocabParallelEmbedding
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.norm.vllm import VllmLayerNorm


class BertEmbeddings(nn.Module):
    """Sum of word, position and token type embeddings, normalized. Without token_type_ids, all have type 0."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = VllmVocabParallelEmbedding(config.vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden)
        self.LayerNorm = VllmLayerNorm(hidden, config.layer_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        words = self.word_embeddings(input_ids)
        places = embedding(positions, self.position_embeddings.weight)
        types = self.token_type_embeddings.weight
        of_types = types[0] if token_type_ids is None else embedding(token_type_ids, types)
        return self.LayerNorm(words + places + of_types)


class BertSelfAttention(nn.Module):
    """Bidirectional attention within each sequence: hidden [T, H] to this rank's heads [T, heads * head_size]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of {heads} heads")
        self.head_size = config.hidden_size // heads
        self.num_heads = parallel.divide(heads, parallel.get_tp_size(), "num_attention_heads")
        self.qkv_proj = VllmQKVParallelLinear(config.hidden_size, self.head_size, heads, return_bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(-1, 3, self.num_heads, self.head_size)
        return attend_within(qkv).flatten(1)


class BertOutput(nn.Module):
    """Projection back to the hidden size, plus residual, normalized."""

    def __init__(self, input_size: int, config: Any) -> None:
        super().__init__()
        self.dense = VllmRowParallelLinear(input_size, config.hidden_size, return_bias=False)
        self.LayerNorm = VllmLayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(hidden) + residual)


class BertAttention(nn.Module):
    """Self-attention and its output. The module is called `self` as in the checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config.hidden_size, config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(hidden), hidden)


class BertIntermediate(nn.Module):
    """Up projection and activation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = VllmColumnParallelLinear(config.hidden_size, config.intermediate_size, return_bias=False)
        self.act = activation_modules.named(config.hidden_act)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(hidden))


class BertLayer(nn.Module):
    """One encoder layer with post-normalization: hidden [T, H] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config.intermediate_size, config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(hidden)
        return self.output(self.intermediate(hidden), hidden)


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class BertModel(nn.Module):
    """config: transformers.BertConfig. Raises ValueError for relative positions and for decoders."""

    embeddings_class: type[nn.Module] = BertEmbeddings

    def __init__(self, config: Any) -> None:
        super().__init__()
        kind = getattr(config, "position_embedding_type", "absolute")
        if kind != "absolute" or config.is_decoder:
            raise ValueError(
                f"{type(self).__name__}: position_embedding_type {kind!r} or is_decoder is not supported"
            )
        self.config = config
        self.embeddings = self.embeddings_class(config)
        self.encoder = BertEncoder(config)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.encoder(self.embeddings(input_ids, positions, token_type_ids))


ARCH = Architecture(
    names=("BertModel",),
    category="recsys",
    model="BertModel",
    runner="Encode",
    model_type="bert",
    packed={"qkv_proj": ["query", "key", "value"]},
    renamed={"bert.": ""},
    unused=("pooler.*", "cls.*", "embeddings.position_ids"),
)
