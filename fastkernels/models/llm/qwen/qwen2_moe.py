"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): Qwen2 with experts, and a shared expert behind a gate."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.llm.qwen.qwen3_moe import is_sparse


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm = d.Norm(eps=config.rms_norm_eps)
    dense = d.Mlp(config.intermediate_size, d.activation(config))
    experts = d.Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob,
        shared=config.shared_expert_intermediate_size, shared_gate=True,
    )  # fmt: skip
    layers = tuple(
        d.Layer(
            d.attention(config, window, bias=config.qkv_bias), experts if is_sparse(config, i) else dense,
            before_attention=norm, before_mlp=norm,
        )
        for i, window in enumerate(d.windows(config))
    )  # fmt: skip
    return d.Decoder(config.vocab_size, config.hidden_size, layers, norm, config.tie_word_embeddings)


ARCH = Architecture(
    names=("Qwen2MoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="qwen2_moe",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
    parts={
        "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
    },
)
