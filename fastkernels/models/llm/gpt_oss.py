"""GPT-OSS (arXiv 2508.10925): attention sinks, alternating windows, YaRN, experts with biases in MXFP4."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    norm, bias = d.Norm(eps=config.rms_norm_eps), config.attention_bias
    experts = d.Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size,
        clamped=(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)),
        mxfp4=bool(getattr(config, "quantization_config", None)),
    )  # fmt: skip
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=bias, out_bias=bias, sinks=True), experts, before_attention=norm,
            before_mlp=norm,
        )
        for window in d.windows(config)
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("GptOssForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gpt_oss",
    quantization=("mxfp4",),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "openai/gpt-oss-20b": {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        "openai/gpt-oss-120b": {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
            "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4"},
        },
    },
)  # fmt: skip
