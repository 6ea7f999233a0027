"""Mamba (arXiv 2312.00752): selective state space layers, without attention or MLPs."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm = d.Norm(eps=config.layer_norm_epsilon)
    mixer = d.Mamba(
        config.conv_kernel, inner=config.intermediate_size, size=config.state_size, rank=config.time_step_rank,
        conv_bias=config.use_conv_bias, bias=config.use_bias,
    )  # fmt: skip
    layer = d.Layer(
        mixer, None, before_attention=norm, names={"self_attn": "mixer", "before_attention": "norm"}
    )
    return d.Decoder(
        config.vocab_size,
        config.hidden_size,
        (layer,) * config.num_hidden_layers,
        norm,
        config.tie_word_embeddings,
    )


ARCH = Architecture(
    names=("MambaForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mamba",
    packed={},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    renamed={
        "backbone.embeddings.": "model.embed_tokens.", "backbone.embedding.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.", "backbone.": "model.",
    },
    parts={"A_log": "A"},
    sizes={"intermediate_size": "", "num_attention_heads": ""},
    public={
        "state-spaces/mamba-2.8b": {
            "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280, "state_size": 16,
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
