"""Seed-OSS (ByteDance): Llama with biases of query, key and value."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return d.llama(
        config, mlp_bias=config.mlp_bias, bias=config.attention_bias, out_bias=config.attention_out_bias
    )


ARCH = Architecture(
    names=("SeedOssForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="seed_oss",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
