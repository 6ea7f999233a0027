"""Command A+ (Cohere 2 MoE): Cohere 2 with experts behind some dense layers."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    bias, rms = config.attention_bias, config.rms_norm_eps
    norm = d.Norm("layer", config.layer_norm_eps) if rms is None else d.Norm(eps=rms)
    dense = d.Mlp(config.prefix_dense_intermediate_size or config.intermediate_size, d.activation(config))
    experts = _experts(config)

    def layer(kind: str, window: int | None) -> d.Layer:
        positions = window is not None or (
            kind == "dense" and config.prefix_dense_sliding_window_pattern == 1
        )
        attention = d.attention(
            config,
            window,
            bias=bias,
            out_bias=bias,
            interleaved=True,
            rope=d.rope(config) if positions else None,
        )
        return d.Layer(attention, dense if kind == "dense" else experts, before_attention=norm, parallel=True)

    return d.Decoder(
        config.vocab_size, config.hidden_size,
        tuple(layer(*found) for found in zip(config.mlp_layer_types, d.windows(config), strict=True)), norm,
        config.tie_word_embeddings, logits_scale=config.logit_scale,
    )  # fmt: skip


def _experts(config: Any) -> d.Experts:
    scoring = config.expert_selection_fn
    if scoring not in ("softmax", "sigmoid"):
        raise d.Unsupported(
            f"config.expert_selection_fn={scoring!r} is not supported, only 'softmax' and 'sigmoid'"
        )
    if config.num_shared_experts:
        d.refuse(config, shared_expert_combination_strategy="sum")
    return d.Experts(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size,
        scoring == "softmax" or config.norm_topk_prob,  # a softmax over the chosen ones sums to 1
        scoring=scoring, shared=config.num_shared_experts * config.intermediate_size,
    )  # fmt: skip


ARCH = Architecture(
    names=("Cohere2MoeForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="cohere2_moe",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.layers.decoder:expert_mapping",
)
