"""Gemma 4, text only: local and global head sizes, shared KV caches, inputs of layers, experts next to the MLP."""

from __future__ import annotations

from typing import Any

from fastkernels.models.common.descriptions import description as d
from fastkernels.models.common.descriptions.architecture import Architecture


def describe(config: Any) -> d.Decoder:
    return decoder(config, config.hidden_size_per_layer_input or 0, _experts(config))


def decoder(config: Any, size: int, experts: d.ParallelExperts | None) -> d.Decoder:
    """size: of the layers' own inputs; 0: none. experts: next to each layer's MLP

    Layers with full attention have sizes of their own (per_layer_config). Norms do not add 1 to their weights.
    """
    d.refuse(config, use_bidirectional_attention="vision")  # text is causal then
    norm, activation = d.Norm(eps=config.rms_norm_eps), d.activation(config, "hidden_activation")
    first = first_shared(config)
    if size and config.vocab_size_per_layer_input < config.vocab_size:
        raise d.Unsupported(
            f"config.vocab_size_per_layer_input={config.vocab_size_per_layer_input} is not supported, only"
            f" vocab_size={config.vocab_size} or more"
        )
    layers = []
    for i, window in enumerate(d.windows(config)):
        own, kind = config.per_layer_config[i], config.layer_types[i]
        shared = _last(config.layer_types[:first], kind) if i >= first else None
        attention = d.attention(
            config, window, head_size=own.head_dim, kv_heads=own.num_key_value_heads, scale=1.0, head_norm=norm,
            bias=config.attention_bias, out_bias=config.attention_bias, rope=d.rope(config, kind),
            value_norm=d.Norm("unit", config.rms_norm_eps), shared=shared,
            keys_as_values=config.attention_k_eq_v and window is None,
        )  # fmt: skip
        wide = 2 if config.use_double_wide_mlp and shared is not None else 1
        layers.append(
            d.Layer(
                attention, d.Mlp(wide * config.intermediate_size, activation), norm, norm, norm, norm,
                names={
                    "after_attention": "post_attention_layernorm", "before_mlp": "pre_feedforward_layernorm",
                    "after_mlp": "post_feedforward_layernorm",
                },
                experts=experts, scaled=True,
            )
        )  # fmt: skip
    return d.Decoder(
        config.vocab_size, config.hidden_size, tuple(layers), norm, config.tie_word_embeddings,
        embedding_scale=config.hidden_size**0.5, logits_softcap=config.final_logit_softcapping or 0.0,
        layer_input=d.LayerInput(config.vocab_size_per_layer_input, size, activation, norm) if size else None,
    )  # fmt: skip


def _experts(config: Any) -> d.ParallelExperts | None:
    if not config.enable_moe_block:
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(config, name):
            raise d.Unsupported(
                f"config.{name}={getattr(config, name)!r} is not supported with enable_moe_block=True"
            )
    activation = d.activation(config, "hidden_activation")
    experts = d.Experts(
        config.num_experts, config.top_k_experts, config.moe_intermediate_size, activation=activation
    )  # fmt: skip
    return d.ParallelExperts(experts, d.Norm(eps=config.rms_norm_eps))


def first_shared(config: Any) -> int:
    """The first layer that reads another layer's keys and values; the number of layers if there is none."""
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if shared == count:
        raise d.Unsupported(f"config.num_kv_shared_layers={shared} leaves no layer with keys and values")
    return count - shared if shared < count else count


def _last(types: list[str], kind: str) -> int:
    """The last of these layers of one type."""
    if kind not in types:
        raise d.Unsupported(f"config.num_kv_shared_layers: no layer before the shared ones is {kind!r}")
    return len(types) - 1 - types[::-1].index(kind)


def own_values(config: Any) -> list[str]:
    """Patterns of the keys that checkpoints leave out: the values of layers whose values are their keys."""
    whole = [i for i, window in enumerate(d.windows(config)) if window is None]
    return [f"model.layers.{i}.self_attn.v_proj.*" for i in whole if config.attention_k_eq_v]


def shared_keys(config: Any) -> list[str]:
    """Patterns of checkpoint keys that layers with another layer's keys and values do not need."""
    layers, parts = (
        range(first_shared(config), config.num_hidden_layers),
        ("k_proj", "v_proj", "k_norm", "v_norm"),
    )
    return [f"model.layers.{i}.self_attn.{part}.*" for i in layers for part in parts]


ARCH = Architecture(
    names=("Gemma4ForCausalLM",),
    category="llm",
    runner="Generate",
    model_type="gemma4_text",
    text_of=("Gemma4ForConditionalGeneration",),
    prefixes={"model.language_model.": "model."},
    unused=("*rotary_emb.inv_freq", "model.*_tower.*", "model.embed_vision.*", "model.embed_audio.*"),
    absent="fastkernels.models.llm.gemma.gemma4:own_values",
    unneeded="fastkernels.models.llm.gemma.gemma4:shared_keys",
    parts={
        "embed_tokens_per_layer": "layer_inputs.embed_tokens",
        "per_layer_model_projection": "layer_inputs.projection",
        "per_layer_projection_norm": "layer_inputs.norm",
        "per_layer_input_gate": "layer_input.gate",
        "per_layer_projection": "layer_input.projection",
        "post_per_layer_input_norm": "layer_input.norm",
        "router.scale": "moe.router.norm.weight",
        "router.proj": "moe.router.proj",
        "router.per_expert_scale": "moe.router.per_expert_scale",
        "experts.gate_up_proj": "moe.experts.w13_weight",
        "experts.down_proj": "moe.experts.w2_weight",
        "post_feedforward_layernorm_1": "moe.after_mlp",
        "pre_feedforward_layernorm_2": "moe.before",
        "post_feedforward_layernorm_2": "moe.after",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    public={
        "google/gemma-4-E4B": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
            "max_position_embeddings": 131072, "sliding_window": 512, "num_kv_shared_layers": 18,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
        },
        "google/gemma-4-26B-A4B": {
            "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
            "vocab_size": 262144, "max_position_embeddings": 262144, "sliding_window": 1024,
            "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    },
)  # fmt: skip
