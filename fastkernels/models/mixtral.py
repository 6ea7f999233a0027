"""Mixtral (Jiang et al., arXiv 2401.04088): Llama's attention, windowed if the config says so, and sparse experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1.embedding import VllmParallelLMHead, VllmVocabParallelEmbedding
from fastkernels.overrides.l1.logits_processor import VllmLogitsProcessor
from fastkernels.overrides.l1.rms_norm import VllmRMSNorm
from fastkernels.overrides.l2.sparse_moe import expert_mapping
from fastkernels.overrides.l3.mixtral_decoder_layer import VllmMixtralDecoderLayer


class MixtralModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Any, prefix: str = "model") -> None:
        super().__init__()
        self.embed_tokens = VllmVocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            VllmMixtralDecoderLayer(config, prefix=f"{prefix}.layers.{i}") for i in layers
        )
        self.norm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


class MixtralForCausalLM(nn.Module):
    """config: transformers.MixtralConfig. Sharded over fastkernels.parallel's group, experts on their inner size.

    Contract as in fastkernels.models.llama. Raises ValueError for an activation that is not silu.
    """

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = MixtralModel(config)
        self.lm_head: Any = VllmParallelLMHead(config.vocab_size, config.hidden_size, prefix="lm_head")
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = VllmLogitsProcessor(config.vocab_size)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        """Which key of the checkpoint is which part of which stacked parameter; see weights.load."""
        return expert_mapping(self.config.num_local_experts)

    def ignored_weights(self, key: str) -> bool:
        """Keys that a checkpoint may carry without use: rope tables, and the head's copy of a tied embedding."""
        return key.endswith("rotary_emb.inv_freq") or (
            self.config.tie_word_embeddings and key == "lm_head.weight"
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)
