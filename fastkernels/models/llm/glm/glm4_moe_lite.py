"""GLM-4.7-Flash (Zhipu): DeepSeek-V3's attention and experts with other sizes."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common import description as d
from fastkernels.models.common.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.latent_decoder(config, d.sigmoid_experts(config), d.dense_layers(config))


ARCH = Architecture(
    names=("Glm4MoeLiteForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="glm4_moe_lite",
    packed={
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"), "gate_up_proj": ("gate_proj", "up_proj"),
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    experts="fastkernels.models.common.decoder:expert_mapping",
)  # fmt: skip
