"""Llama (Touvron et al., arXiv 2302.13971) and what has its architecture: Llama 2 and 3, SmolLM2.

Contract of every language model here: model(input_ids [T], positions [T]) gives hidden states [T, H],
model.compute_logits(hidden [B, H]) gives [B, V]; what else a step needs is in fastkernels.core.forward_context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.block.vllm import VllmLlamaDecoderLayer
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.norm.vllm import VllmRMSNorm


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

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
    """config: transformers.LlamaConfig. Sharded over fastkernels.core.parallel's group.

    A model that differs in its layers is a subclass with a `decoder_layer` of its own; see qwen3.py.
    """

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

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
        """One layer: layer(positions [T], hidden [T, H], residual [T, H] or None) gives (hidden, residual)."""
        return VllmLlamaDecoderLayer(None, prefix, config=config)

    def ignored_weights(self, key: str) -> bool:
        """Keys that a checkpoint may carry without use: rope tables, and the head's copy of a tied embedding."""
        return key.endswith("rotary_emb.inv_freq") or (
            self.config.tie_word_embeddings and key == "lm_head.weight"
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)
