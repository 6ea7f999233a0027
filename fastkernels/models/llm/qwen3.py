"""Qwen3 (arXiv 2505.09388): Llama with norms of each query and key head, and a head_dim of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastkernels.models.llm.llama import LlamaForCausalLM
from fastkernels.overrides.block.vllm import VllmQwen3DecoderLayer


class Qwen3ForCausalLM(LlamaForCausalLM):
    """config: transformers.Qwen3Config; see LlamaForCausalLM."""

    @staticmethod
    def decoder_layer(config: Any, prefix: str) -> nn.Module:
        return VllmQwen3DecoderLayer(config, prefix=prefix)
