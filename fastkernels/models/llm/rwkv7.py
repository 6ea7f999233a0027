"""RWKV-7 (arXiv 2503.14456): a delta rule in place of attention, as flash-linear-attention has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.configs import fla
from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture

RANKS = ("decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim")


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    made = fla.fields(
        raw,
        {"head_dim": 64, "num_heads": None, "value_dim": None, "norm_first": True, "norm_bias": True, "norm_eps": 1e-5},
        {"hidden_act": "sqrelu", **dict(zip(RANKS, (64, 64, 128, 16), strict=True))},
    )  # fmt: skip
    sizes = made["hidden_size"], made["num_heads"]
    if made["head_dim"] is None and all(type(n) is int and n > 0 for n in sizes):
        made["head_dim"] = sizes[0] // sizes[1]
    return made


def describe(config: Any) -> d.Decoder:
    d.refuse(config, hidden_act="sqrelu", attn=None)
    fla.positive(config, "head_dim", *RANKS)
    fla.numbers(config, "norm_eps")
    hidden, size, count = config.hidden_size, config.head_dim, config.num_hidden_layers
    if hidden % size:
        raise d.Unsupported(f"config.head_dim={size} is not supported, only divisors of hidden_size={hidden}")
    if config.value_dim not in (None, hidden, [hidden] * count):
        raise d.Unsupported(
            f"config.value_dim={config.value_dim!r} is not supported, only hidden_size={hidden}"
        )
    norm = d.Norm("layer", config.norm_eps, bool(config.norm_bias))
    mlp = d.Mlp(fla.mlp_size(config, gated=False), "relu2", gated=False, shift=True)
    decay, rate, gate, mixed = (getattr(config, name) for name in RANKS)
    layers = tuple(
        d.Layer(
            d.Rwkv7(
                heads=hidden // size, head_size=size, decay_rank=decay, rate_rank=rate, gate_rank=gate,
                value_rank=mixed if i else None, key_eps=1e-6 if config.fuse_norm else 1e-24,
                norm=d.Norm("layer", size * config.norm_eps, True),
            ),
            mlp, before_attention=norm, before_mlp=norm,
            names={"self_attn": "attn", "before_attention": "attn_norm", "mlp": "ffn", "before_mlp": "ffn_norm"},
        )
        for i in range(count)
    )  # fmt: skip
    return d.Decoder(
        config.vocab_size, hidden, layers, norm, bool(config.tie_word_embeddings),
        embedding_norm=norm if config.norm_first else None,
    )  # fmt: skip


ARCH = Architecture(
    names=("RWKV7ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="rwkv7",
    packed={"shifts": ("shift_r", "shift_w", "shift_k", "shift_v", "shift_a", "shift_g")},
    renamed={"model.embeddings.": "model.embed_tokens.", "model.layers.0.pre_norm.": "model.embed_norm."},
    parts={
        "attn.x_r": "attn.shift_r.weight", "attn.x_w": "attn.shift_w.weight", "attn.x_k": "attn.shift_k.weight",
        "attn.x_v": "attn.shift_v.weight", "attn.x_a": "attn.shift_a.weight", "attn.x_g": "attn.shift_g.weight",
        "attn.x_x": "attn.shifts.weight",  # all six, in the first checkpoints
        "ffn.x_k": "ffn.shift.weight", "ffn.key": "ffn.up_proj", "ffn.value": "ffn.down_proj",
    },
    unused=("model.layers.0.attn.v_lora.*",),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    sizes={"intermediate_size": "", "num_attention_heads": ""},
    own_config="fastkernels.models.llm.rwkv7:fields",
    fast_tokenizer=True,
    public={
        "fla-hub/rwkv7-2.9B-world": {
            "hidden_size": 2560, "num_hidden_layers": 32, "vocab_size": 65536, "decay_low_rank_dim": 96,
            "a_low_rank_dim": 96, "gate_low_rank_dim": 320, "v_low_rank_dim": 64,
        },
        "fla-hub/rwkv7-1.5B-world": {
            "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 65536, "decay_low_rank_dim": 96,
            "a_low_rank_dim": 96, "gate_low_rank_dim": 256, "v_low_rank_dim": 64,
        },
    },
)  # fmt: skip
