"""Mixtral (Jiang et al., arXiv 2401.04088): Llama with sparse experts and an optional sliding window."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm = d.Norm(eps=config.rms_norm_eps)
    experts = d.Experts(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        names=d.NUMBERED,
    )
    layers = tuple(
        d.Layer(
            d.attention(config, window), experts, before_attention=norm, before_mlp=norm,
            names={"mlp": "block_sparse_moe"},
        )
        for window in d.one_window(config)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("MixtralForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mixtral",
    layers=("mixtral_decoder_layer",),
    packed={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    experts="fastkernels.models.common.layers.decoder:numbered_expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    config_fields=("num_local_experts", "num_experts_per_tok"),
    config_defaults={
        "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    },
    public={
        "mistralai/Mixtral-8x7B": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    },
)  # fmt: skip
