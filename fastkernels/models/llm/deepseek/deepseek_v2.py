"""DeepSeek-V2 (arXiv 2405.04434) and V2-Lite: latent attention, softmax routing, shared experts."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture

METHODS = ("greedy", "group_limited_greedy")


def describe(config: Any) -> d.Decoder:
    d.refuse(
        config, hidden_act="silu", moe_layer_freq=1, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False
    )  # fmt: skip
    method = config.topk_method or "greedy"
    if method not in METHODS:
        raise d.Unsupported(f"config.topk_method={method!r} is not supported, only {', '.join(METHODS)}")
    grouped = method == "group_limited_greedy"
    experts = d.Experts(
        config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, normalize=False,
        groups=config.n_group if grouped else 1, top_groups=config.topk_group if grouped else 1,
        scale=config.routed_scaling_factor, shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )  # fmt: skip
    return d.latent_decoder(config, experts)


ARCH = Architecture(
    names=("DeepseekV2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="deepseek_v2",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    experts="fastkernels.models.common.decoder:expert_mapping",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)  # fmt: skip
