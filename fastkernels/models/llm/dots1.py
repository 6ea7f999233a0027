"""dots.llm1 (rednote, arXiv 2506.05767): Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    dense, experts = d.Mlp(config.intermediate_size, d.activation(config)), d.sigmoid_experts(config)
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=bias, out_bias=bias, head_norm=norm),
            dense if i < config.first_k_dense_replace else experts, before_attention=norm, before_mlp=norm,
        )
        for i, window in enumerate(d.windows(config))
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Dots1ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="dots1",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    public={
        "rednote-hilab/dots.llm1": {
            "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 152064,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "n_routed_experts": 128, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1, "sliding_window": None,
        },
    },
)  # fmt: skip
