"""The head of DeepSeek-V3 for multi-token prediction (arXiv 2412.19437, section 2.2), the layer behind its last one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.layers.decoder import DecoderLayer, add_and_norm, make_norm
from fastkernels.models.common.layers.mtp import MtpHead
from fastkernels.models.llm.deepseek.deepseek_v3 import describe
from fastkernels.overrides.embedding.vllm import (
    VllmLogitsProcessor,
    VllmParallelLMHead,
    VllmVocabParallelEmbedding,
)
from fastkernels.overrides.linear.vllm import VllmReplicatedLinear


class PredictionLayer(DecoderLayer):
    """The layer with what leads into it and out of it, by the names of checkpoints.

    own: whether it has an embedding and a head of its own
    """

    def __init__(self, layer: d.Layer, config: Any, prefix: str, own: tuple[bool, bool]) -> None:
        hidden, norm = config.hidden_size, d.Norm(eps=config.rms_norm_eps)
        super().__init__(layer, hidden, prefix)
        self.enorm, self.hnorm = make_norm(norm, hidden), make_norm(norm, hidden)
        self.eh_proj = VllmReplicatedLinear(2 * hidden, hidden, bias=False, prefix=f"{prefix}.eh_proj")
        if own[0]:
            self.embed_tokens = VllmVocabParallelEmbedding(
                config.vocab_size, hidden, prefix=f"{prefix}.embed_tokens"
            )
        self.shared_head = nn.Module()
        self.shared_head.norm = make_norm(norm, hidden)
        if own[1]:
            self.shared_head.head = VllmParallelLMHead(
                config.vocab_size, hidden, prefix=f"{prefix}.shared_head.head"
            )


class DeepseekMtp(MtpHead):
    """See MtpHead. The embedding at position 0 is zero, as in vLLM."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        longer, prefix = copy.copy(config), self.prefix(config)
        longer.num_hidden_layers += 1
        has = getattr(config, "has", None)
        own = [
            has is None or f"{prefix}{name}.weight" in has for name in ("embed_tokens", "shared_head.head")
        ]
        layer = PredictionLayer(describe(longer).layers[-1], config, prefix[:-1], (own[0], own[1]))
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(config.num_hidden_layers): layer})
        self.logits_processor = VllmLogitsProcessor(config.vocab_size)

    @staticmethod
    def prefix(config: Any) -> str:
        return f"model.layers.{config.num_hidden_layers}."

    @property
    def layer(self) -> Any:
        layers: Any = self.model.layers
        return next(iter(layers.values()))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        embed = getattr(layer, "embed_tokens", None) or self.target.model.embed_tokens
        embedded = embed(input_ids).masked_fill((positions == 0)[:, None], 0.0)
        x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), dim=-1))[0]
        return add_and_norm(layer.shared_head.norm, *layer(positions, x, None))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, vocab_size]"""
        head = getattr(self.layer.shared_head, "head", None) or self.target.lm_head
        return self.logits_processor(head, hidden)


def unneeded(config: Any) -> list[str]:
    """The keys of the target."""
    layers = [f"model.layers.{i}.*" for i in range(config.num_hidden_layers)]
    return [*layers, "model.embed_tokens.*", "model.norm.*", "lm_head.*"]


ARCH = Architecture(
    names=("DeepSeekMTPModel",),
    category="llm",
    model="DeepseekMtp",
    runner="Draft",
    model_type="deepseek_v3",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    unneeded="fastkernels.models.llm.deepseek.deepseek_mtp:unneeded",
)  # fmt: skip
