"""GLA (arXiv 2312.06635): linear attention with a decay for each channel, as flash-linear-attention has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.configs import fla
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

RANK, NORMALIZER = 16, 16  # fixed there


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        "clamp_min": None,
        "use_gk": True,
        "use_gv": False,
    }
    return fla.fields(raw, fla.LINEAR, own)


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_gk=True, use_gv=False, gate_low_rank_dim=RANK, gate_logit_normalizer=NORMALIZER)
    least = config.clamp_min
    if least is not None and not (type(least) in (int, float) and math.isfinite(least)):
        raise d.Unsupported(f"config.clamp_min={least!r:.80} is not supported, only numbers and None")
    return fla.linear_decoder(config, rank=RANK, normalizer=NORMALIZER, least_decay=least)


ARCH = Architecture(
    names=("GLAForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gla",
    packed={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
        "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    },
    renamed={"model.embeddings.": "model.embed_tokens."},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    sizes={"intermediate_size": "", "num_attention_heads": ""},
    own_config="fastkernels.models.llm.gla:fields",
    fast_tokenizer=True,
    public={
        "fla-hub/gla-1.3B-100B": {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "num_heads": 4},
    },
)  # fmt: skip
