"""Mamba-2 (arXiv 2405.21060): state space layers with one decay for each head, without attention or MLPs."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="silu")
    norm = d.Norm(eps=config.layer_norm_epsilon)
    mixer = d.Mamba2(
        config.conv_kernel, heads=config.num_heads, head_size=config.head_dim, groups=config.n_groups,
        size=config.state_size, norm=norm, conv_bias=config.use_conv_bias, bias=config.use_bias,
        dt_limits=d.limits(config.time_step_limit),
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
    names=("Mamba2ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="mamba2",
    packed={},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    renamed={
        "backbone.embeddings.": "model.embed_tokens.", "backbone.embedding.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.", "backbone.": "model.",
    },
    parts={"A_log": "A"},
    sizes={"intermediate_size": "", "num_attention_heads": ""},
    public={
        "state-spaces/mamba2-2.7b": {
            "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80, "head_dim": 64,
            "n_groups": 1, "state_size": 128, "tie_word_embeddings": True,
        },
        "mistralai/Mamba-Codestral-7B-v0.1": {
            "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "num_heads": 128, "head_dim": 64,
            "n_groups": 8, "state_size": 128,
        },
    },
)  # fmt: skip
