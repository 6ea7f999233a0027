"""A checkpoint's config.json, read without transformers where that is not needed: its import takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
MORE = {"llama": (), "qwen3": ("head_dim",), "mixtral": ("num_local_experts", "num_experts_per_tok")}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What transformers translates into other fields, or somebody else has to understand.
NOT_PLAIN = ("auto_map", "quantization_config", "partial_rotary_factor", "text_config")


def read(folder: Path) -> SimpleNamespace | None:
    """The fields of a plain config.json as transformers' config has them, with its `dtype`, `head_dim`,
    `rope_parameters` and `layer_types`.

    None unless the model type is one of MORE, every field that has a default there is given with a value of its type,
    and nothing is asked for that our models do not do: then transformers fills in, translates, or says what is wrong.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or not _is_plain(raw):
        return None
    config = SimpleNamespace(**raw)
    config.dtype = DTYPES[raw["dtype"] if "dtype" in raw else raw["torch_dtype"]]
    config.rope_parameters = _rope_parameters(raw)
    config.head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if raw["model_type"] == "qwen3":
        config.sliding_window, config.layer_types = None, ["full_attention"] * raw["num_hidden_layers"]
    return config


def _is_plain(raw: dict[str, Any]) -> bool:
    kind, types, names = raw.get("model_type"), raw.get("layer_types"), raw.get("architectures")
    numbers = [raw.get(name) for name in (*SIZES, *MORE.get(str(kind), ()))]
    eos = raw.get("eos_token_id", "")
    return (
        kind in MORE
        and all(type(n) is int and n > 0 for n in numbers)
        and (raw.get("head_dim") is None or type(raw["head_dim"]) is int)
        and (kind == "qwen3" or raw["hidden_size"] % raw["num_attention_heads"] == 0)
        and type(raw.get("rms_norm_eps")) is float
        and type(raw.get("hidden_act")) is str
        and type(raw.get("tie_word_embeddings")) is bool
        and all(type(raw.get(name, False)) is bool for name in ("attention_bias", "mlp_bias"))
        and (eos is None or all(type(i) is int for i in (eos if isinstance(eos, list) else [eos])))
        and isinstance(names, list)
        and bool(names)
        and all(type(name) is str for name in names)
        and str(raw["dtype"] if "dtype" in raw else raw.get("torch_dtype")) in DTYPES
        and not raw.get("use_sliding_window")
        and (types is None or types == ["full_attention"] * raw["num_hidden_layers"])
        and type(raw.get("sliding_window")) in (int, type(None))
        and not any(name in raw for name in NOT_PLAIN)
        and _rope_parameters(raw) is not None
    )


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any] | None:
    """In the form of transformers 5, also where an older one wrote rope_theta and rope_scaling; None if not plain."""
    if raw.get("rope_parameters") is not None:
        made = raw["rope_parameters"]
    else:
        scaling = raw.get("rope_scaling") or {"rope_type": "default"}
        made = {"rope_theta": raw.get("rope_theta"), **scaling} if isinstance(scaling, dict) else None
    plain = isinstance(made, dict) and made.get("rope_type") in ("default", "llama3")
    return dict(made) if plain and type(made.get("rope_theta")) in (int, float) else None
