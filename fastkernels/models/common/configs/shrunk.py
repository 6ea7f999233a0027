"""Small configs of the same structure as a model's, for checks on a CPU: every kind of layer, few channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastkernels.models.common.configs import config as config_file
from fastkernels.models.shaped_blocks import SMALL

# {field: the most that a small model has}
MOST: dict[str, int] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "ffn_dim": 96, "ffn_hidden_size": 96,
    "shared_intermediate_size": 40, "shared_expert_intermediate_size": 40, "prefix_dense_intermediate_size": 80,
    "word_embed_proj_dim": 64, "vocab_size": 256, "vocab_size_per_layer_input": 256, "n_inner": 96, "n_embd": 64,
    "hidden_size_per_layer_input": 24, "head_dim": 16, "global_head_dim": 24, "num_attention_heads": 4, "n_head": 4,
    "d_model": 64, "n_heads": 4, "max_seq_len": 512, "n_kv_heads": 4, "mlp_hidden_size": 96, "embedding_size": 256,
    "max_sequence_length": 512, "mask_token_id": 2,
    "num_global_key_value_heads": 1, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 48, "q_lora_rank": 40,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "qk_head_dim": 40, "index_topk": 9,
    "index_n_heads": 12, "index_head_dim": 24, "sliding_window": 8, "max_position_embeddings": 512, "rotary_dim": 8,
    "time_step_rank": 8, "state_size": 8, "num_heads": 8, "n_groups": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "out_hidden_size": 64, "output_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3, "type_vocab_size": 2,
}  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
PER_PAIR = ("short_factor", "long_factor")  # LongRoPE: numbers for each pair of channels
# Fields that a config derives from others
COMPUTED = ("transformers_version", "per_layer_config", "out_features", "out_indices", "stage_names")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


def fields(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON has them, with its architecture."""
    found = dict(config.to_dict())
    for name in COMPUTED:
        found.pop(name, None)
    if getattr(config, "parts", None) is not None:  # a pipeline
        found.pop("dtype", None)
    return {**found, "architectures": list(config.architectures), "model_type": config.model_type}


def config_of(given: Mapping[str, Any]) -> Any:
    """The config with these fields."""
    if "parts" in given:
        return config_file.PlainConfig(**given, dtype=None)
    plain = config_file.plain(dict(given))
    if plain is not None:
        return plain
    rest = {name: value for name, value in given.items() if name not in ("model_type", "architectures")}
    return config_file.of_type(given["model_type"], given["architectures"], rest)


def small(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a small model with as many layers, in float32."""
    if (own := SMALL.get(given.get("model_type", ""))) is not None:
        if "parts" not in given:
            return {**_merged(given, own), "dtype": "float32"}
        return {**given, "parts": _merged(given["parts"], own)}
    made: dict[str, Any] = {
        name: small(value) if name.endswith("_config") and isinstance(value, dict) else _least(name, value)
        for name, value in given.items()
    }
    if isinstance(made.get("embed_dim"), int) and isinstance(made.get("num_heads"), int):  # of a vision tower
        made["embed_dim"] = min(made["embed_dim"], 64)
    if "num_attention_heads" not in made or "hidden_size" not in made:  # such as d_model
        return {**made, "dtype": "float32"}
    heads = given.get("num_attention_heads")
    for name in KV_HEADS:
        if isinstance(given.get(name), int):
            made[name] = made["num_attention_heads"] if given[name] == heads else min(given[name], 2)
    if given.get("kv_lora_rank"):
        made["num_key_value_heads"] = made["num_attention_heads"]
        if given.get("head_dim"):
            made["head_dim"] = made["qk_rope_head_dim"]
    if given.get("n_group") == 1:
        made["topk_group"] = 1
    pairs = (made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]) // 2
    rope = made.get("rope_parameters")
    if isinstance(rope, dict) and any(name in rope for name in PER_PAIR):
        pairs = int(2 * pairs * rope.get("partial_rotary_factor", 1.0)) // 2
        made["rope_parameters"] = {k: v[:pairs] if k in PER_PAIR else v for k, v in rope.items()}
    if isinstance(rope, dict) and rope.get("mrope_section"):
        section = [pairs * n // sum(rope["mrope_section"]) for n in rope["mrope_section"]]
        section[0] += pairs - sum(section)
        made["rope_parameters"] = {**rope, "mrope_section": section}
    return {**made, "dtype": "float32"}


def _merged(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with other values, in tables within them, too."""
    tables = {k for k in more if isinstance(more[k], dict) and isinstance(given.get(k), dict)}
    return {**given, **more, **{k: _merged(given[k], more[k]) for k in tables}}


def short(given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a small model with the first layers; those that share keys need all layers."""
    made = small(given)
    name = next((n for n in LAYERS if n in made), "")
    count = max(layers, 2)
    if not name or made[name] <= count or made.get("num_kv_shared_layers"):
        return made
    return first(made, name, count)


def first(given: Mapping[str, Any], name: str, count: int) -> dict[str, Any]:
    """The fields of a model with its first layers. name: the field of LAYERS that it has"""
    before = given[name]
    made = {k: v[:count] if isinstance(v, list) and len(v) == before else v for k, v in given.items()}
    if isinstance(linear := made.get("linear_attn_config"), dict):  # Kimi Linear's numbers of layers, from 1
        kept = {k: [n for n in v if n <= count] for k, v in linear.items() if isinstance(v, list)}
        made["linear_attn_config"] = {**linear, **kept}
    return {**made, name: count}


def _least(name: str, value: Any) -> Any:
    most = MOST.get(name)
    return min(value, most) if most is not None and type(value) is int else value
