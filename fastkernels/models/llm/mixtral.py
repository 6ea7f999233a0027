"""Mixtral (Jiang et al., arXiv 2401.04088): Llama with sparse experts and an optional sliding window."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture
from fastkernels.models.llm.llama import LlamaForCausalLM
from fastkernels.overrides.block.vllm import VllmMixtralDecoderLayer


class MixtralForCausalLM(LlamaForCausalLM):
    """config: transformers.MixtralConfig; see LlamaForCausalLM. Experts are sharded along their inner dimension.

    Raises ValueError for an activation other than silu.
    """

    @staticmethod
    def decoder_layer(config: Any, prefix: str) -> nn.Module:
        return VllmMixtralDecoderLayer(config, prefix=prefix)


def describe(config: Any) -> d.Decoder:
    norm = d.Norm(eps=config.rms_norm_eps)
    experts = d.Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        names=("w1", "w3", "w2"),
    )
    layers = tuple(
        d.Layer(
            d.attention(config, window), experts, before_attention=norm, before_mlp=norm,
            names={"mlp": "block_sparse_moe"},
        )
        for window in d.windows(config)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("MixtralForCausalLM",),
    category="llm",
    model="MixtralForCausalLM",
    runner="Generate",
    model_type="mixtral",
    layers=("mixtral_decoder_layer",),
    packed={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    experts="fastkernels.models.common.decoder:numbered_expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    config_fields=("num_local_experts", "num_experts_per_tok"),
    config_defaults={"eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    public={
        "mistralai/Mixtral-8x7B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    },
)  # fmt: skip
