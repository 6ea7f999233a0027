"""Mixtral (Jiang et al., arXiv 2401.04088): Llama's attention, windowed if the config says so, and sparse experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1.embedding import VllmParallelLMHead, VllmVocabParallelEmbedding
from fastkernels.overrides.l1.logits_processor import VllmLogitsProcessor
from fastkernels.overrides.l1.rms_norm import VllmRMSNorm
from fastkernels.overrides.l2.sparse_moe import VllmMixtralMoE, expert_mapping
from fastkernels.overrides.l3._llama_attention import LlamaAttention


class MixtralDecoderLayer(nn.Module):
    """Norm, attention, norm, experts; hidden_states, residual: [T, H]; residual is None in the first layer."""

    def __init__(self, config: Any, prefix: str = "") -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        # The window of all layers, where vLLM's layers find it too.
        cache_config = SimpleNamespace(sliding_window=getattr(config, "sliding_window", None))
        self.self_attn = LlamaAttention(
            config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            config.max_position_embeddings, cache_config=cache_config, prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.block_sparse_moe = VllmMixtralMoE(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size,
            prefix=f"{prefix}.block_sparse_moe",
        )  # fmt: skip
        self.input_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual


class MixtralModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Any, prefix: str = "model") -> None:
        super().__init__()
        self.embed_tokens = VllmVocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(MixtralDecoderLayer(config, f"{prefix}.layers.{i}") for i in layers)
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
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only 'silu'")
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
