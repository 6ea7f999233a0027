"""Granite 3 MoE with a shared expert, all of whose projections the checkpoint packs."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.llm.granite import granitemoe


def describe(config: Any) -> d.Decoder:
    return granitemoe.decoder(config, config.shared_intermediate_size)


ARCH = Architecture(
    names=("GraniteMoeSharedForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="granitemoeshared",
    packed={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    parts={
        "block_sparse_moe.router.layer": "block_sparse_moe.gate",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.w13_weight",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.w2_weight",
        "shared_mlp.input_linear": "block_sparse_moe.shared_experts.gate_up_proj",
        "shared_mlp.output_linear": "block_sparse_moe.shared_experts.down_proj",
    },
)
