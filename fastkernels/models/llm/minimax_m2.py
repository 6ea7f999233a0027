"""MiniMax-M2: norms over all query and all key heads, a partial rotary embedding, experts chosen by a sigmoid."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu", scoring_func="sigmoid")
    norm = d.Norm(eps=config.rms_norm_eps)
    experts = d.Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, names=("w1", "w3", "w2"),
        scoring="sigmoid", correction=True,
    )  # fmt: skip
    layer = d.Layer(
        d.attention(config, partial=True, wide_norm=norm), experts, before_attention=norm, before_mlp=norm,
        names={"mlp": "block_sparse_moe"},
    )  # fmt: skip
    layers = (layer,) * config.num_hidden_layers
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("MiniMaxM2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="minimax_m2",
    packed={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    experts="fastkernels.models.common.layers.decoder:numbered_expert_mapping",
    parts={"block_sparse_moe.e_score_correction_bias": "block_sparse_moe.gate.e_score_correction_bias"},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "MiniMaxAI/MiniMax-M2": {
            "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "vocab_size": 200064,
            "max_position_embeddings": 196608, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
    },
)  # fmt: skip
