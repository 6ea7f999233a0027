"""Mixtral (Jiang et al., arXiv 2401.04088): Llama's attention, windowed if the config says so, and sparse experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastkernels.models.llm.llama import LlamaForCausalLM
from fastkernels.overrides.block.vllm import VllmMixtralDecoderLayer
from fastkernels.overrides.moe.sparse_moe import expert_mapping


class MixtralForCausalLM(LlamaForCausalLM):
    """config: transformers.MixtralConfig; see LlamaForCausalLM. The experts are sharded on their inner size.

    Raises ValueError for an activation that is not silu.
    """

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    @staticmethod
    def decoder_layer(config: Any, prefix: str) -> nn.Module:
        return VllmMixtralDecoderLayer(config, prefix=prefix)

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        """Which key of the checkpoint is which part of which stacked parameter; see weights.load."""
        return expert_mapping(self.config.num_local_experts)
