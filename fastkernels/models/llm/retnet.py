"""RetNet (arXiv 2307.08621): linear attention with a constant decay, as flash-linear-attention has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.configs import fla, length
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    own = {"expand_k": 1.0, "expand_v": 2.0, "num_heads": 8, "hidden_ratio": 2}
    return fla.fields(raw, fla.LINEAR, own)


def describe(config: Any) -> d.Decoder:
    d.refuse(config, use_short_conv=False)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    positions = config.max_position_embeddings or getattr(config, "max_model_len", None) or length.UNLIMITED
    return fla.linear_decoder(config, rope=rope, max_positions=positions)


ARCH = Architecture(
    names=("RetNetForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="retnet",
    renamed={"model.embeddings.": "model.embed_tokens."},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    sizes={"intermediate_size": "", "num_attention_heads": ""},
    own_config="fastkernels.models.llm.retnet:fields",
    fast_tokenizer=True,
    public={
        "fla-hub/retnet-1.3B-100B": {
            "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "num_heads": 8,
        },
    },
)  # fmt: skip
