"""Llama (Touvron et al., arXiv 2302.13971), Llama 2 and 3, SmolLM2.

Every language model has this interface: model(input_ids [T], positions [T]) returns hidden states [T, H], and
model.compute_logits(hidden [B, H]) returns [B, V]. The attention metadata of a step comes from
fastkernels.core.forward_context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture
from fastkernels.overrides.block.vllm import VllmLlamaDecoderLayer
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.norm.vllm import VllmRMSNorm


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(
        self, config: Any, decoder_layer: Callable[[Any, str], nn.Module], prefix: str = "model"
    ) -> None:
        super().__init__()
        self.embed_tokens = VllmVocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            decoder_layer(config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class LlamaForCausalLM(nn.Module):
    """config: transformers.LlamaConfig. Sharded over the group of fastkernels.core.parallel.

    A model with other layers is a subclass that overrides `decoder_layer`; see qwen3.py.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, self.decoder_layer)
        self.lm_head: Any = VllmParallelLMHead(config.vocab_size, config.hidden_size, prefix="lm_head")
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = VllmLogitsProcessor(config.vocab_size)

    @staticmethod
    def decoder_layer(config: Any, prefix: str) -> nn.Module:
        """Build one layer: layer(positions [T], hidden [T, H], residual [T, H] or None) returns (hidden, residual)."""
        return VllmLlamaDecoderLayer(None, prefix, config=config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)


def describe(config: Any) -> d.Decoder:
    bias = config.attention_bias
    return d.llama(config, bias=bias, out_bias=bias)


ARCH = Architecture(
    names=("LlamaForCausalLM",),
    category="llm",
    model="LlamaForCausalLM",
    runner="Generate",
    model_type="llama",
    layers=("llama_decoder_layer",),

    tied={"lm_head.weight": "model.embed_tokens.weight"},
    config_fields=(),
    config_defaults={"eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    fast_tokenizer=True,
    public={
        "meta-llama/Llama-3.1-8B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        },
        "meta-llama/Llama-3.1-70B": {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        },
        "meta-llama/Llama-3.2-1B": {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        "meta-llama/Llama-3.2-3B": {
            "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "head_dim": 128, "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
