"""Read config.json without transformers where possible: importing transformers takes seconds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.models.common.checkpoints import scenes
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.architecture import Architecture

log = logging.getLogger("fastkernels")
COMMON = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALL_DTYPES = {**DTYPES, "float64": torch.float64}
# transformers translates these into other fields, or they need code that is not ours.
NOT_PLAIN = ("auto_map", "quantization_config", "partial_rotary_factor", "text_config")


class PlainConfig(SimpleNamespace):
    """The fields of a plain config.json as transformers' config has them."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json."""
        older = ("rope_theta", "rope_scaling", "torch_dtype")  # which others replace
        made = {name: value for name, value in vars(self).items() if name not in older}
        return {**made, "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch.")}


class MediaConfig:
    """The config of a model that reads media: the fields of its text model, and the others of the whole."""

    FIRST = (
        "architectures",
        "model_type",
        "dtype",
        "quantization_config",
        "eos_token_id",
        "tie_word_embeddings",
    )

    def __init__(self, whole: Any) -> None:
        self.__dict__.update(whole=whole, text_config=whole.text_config)
        for name in self.FIRST:
            if getattr(whole, name, None) is not None:
                self.__dict__[name] = getattr(whole, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return (
            getattr(self.text_config, name) if hasattr(self.text_config, name) else getattr(self.whole, name)
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json."""
        return self.whole.to_dict()


def read(folder: Path) -> PlainConfig | None:
    """The config of a folder if its config.json is plain, else None."""
    try:
        return plain(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return None


def of_scene(file: Path) -> PlainConfig | None:
    """The config of a folder with a scene's file, and without config.json. Raises CheckpointError."""
    try:
        return plain(scenes.config_of(file))
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from error


def plain(raw: Any) -> PlainConfig | None:
    """The fields of a config.json as transformers' config has them, including `dtype`, `head_dim`, `rope_parameters`
    and `layer_types`.

    None unless a model file declares `config_fields` for the model type, every field without a default is given with
    a value of its type, and no field requests a feature that our models lack. transformers handles those cases.
    A model type that transformers does not have is read as its model file declares it (`own_config`).
    """
    if isinstance(raw, dict) and (own := _with_own_config(raw.get("model_type"))) is not None:
        dtype = ALL_DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")))
        return PlainConfig(**{**registry.load(own.own_config)(raw), "dtype": dtype})
    arch = _arch_of(raw)
    if arch is None:
        return None
    raw = {"attention_bias": False, "mlp_bias": False, **arch.config_defaults, **raw}
    if not _is_plain(raw, arch):
        return None
    config = PlainConfig(**raw)
    config.dtype = DTYPES[raw["dtype"] if "dtype" in raw else raw["torch_dtype"]]
    config.rope_parameters = _rope_parameters(raw)
    config.head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if "use_sliding_window" in arch.config_defaults:  # false here: _is_plain rejects true
        config.sliding_window, config.layer_types = None, ["full_attention"] * raw["num_hidden_layers"]
    return config


def from_transformers(folder: Path) -> Any:
    """The whole config of a folder, also where the model type is an alias. No code of the checkpoint is run."""
    raw = json.loads((folder / "config.json").read_text())
    if _with_own_config(raw.get("model_type")) is not None:
        return plain(raw)
    from transformers import AutoConfig

    name, known = (raw.get("architectures") or [""])[0], registry.by_architecture()
    if name in known and raw.get("model_type") in known[name].arch.aliases:
        fields = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
        return AutoConfig.for_model(known[name].arch.model_type, name_or_path=str(folder), **fields)
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def of_type(kind: str, architectures: Sequence[str], fields: Mapping[str, Any]) -> Any:
    """The config of a model type with these fields; others have their defaults."""
    if _with_own_config(kind) is not None:
        return plain({**fields, "model_type": kind, "architectures": list(architectures)})
    from transformers import AutoConfig

    made = AutoConfig.for_model(kind, **fields)
    made.architectures = list(architectures)
    return text_model(made)


def text_model(config: Any) -> Any:
    """The config with the fields of its text model, where an architecture has one within.

    Of some architectures a model file describes the text model only.
    """
    names = getattr(config, "architectures", None) or [""]
    found = registry.by_architecture().get(names[0])
    if found is None or names[0] not in found.arch.text_of:
        return _with_media(config, found)
    own = getattr(config, found.arch.within)
    for name in ("dtype", "quantization_config", "eos_token_id", "tie_word_embeddings"):
        if getattr(config, name, None) is not None:
            setattr(own, name, getattr(config, name))
    own.architectures = [found.arch.names[0]]
    log.info("%s: only its %s is used", names[0], own.architectures[0])
    return _with_media(own, found)


def _with_media(config: Any, found: registry.Model | None) -> Any:
    """The config of a model that reads media, whose text model has one within."""
    has = found is not None and found.arch.media and hasattr(config, "text_config")
    return MediaConfig(config) if has else config


def _with_own_config(kind: Any) -> Architecture | None:
    """The architecture of a model type that transformers does not have."""
    found = (m.arch for m in registry.models().values() if m.arch.own_config)
    return next((arch for arch in found if arch.model_type == kind), None)


def _arch_of(raw: Any) -> Architecture | None:
    """The architecture of this model type, if its config.json may be read without transformers."""
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    found = (m.arch for m in registry.models().values() if m.arch.model_type == kind)
    return next((arch for arch in found if arch.config_fields is not None), None)


def _is_plain(raw: dict[str, Any], arch: Architecture) -> bool:
    types, names, needed = raw.get("layer_types"), raw.get("architectures"), arch.config_fields or ()
    numbers = [raw.get(name) for name in (*COMMON, *needed)]
    eos = raw.get("eos_token_id", "")
    return (
        all(type(n) is int and n > 0 for n in numbers)
        and (raw.get("head_dim") is None or type(raw["head_dim"]) is int)
        and ("head_dim" in needed or raw["hidden_size"] % raw["num_attention_heads"] == 0)
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
    """Rope parameters as transformers 5 writes them, also from rope_theta and rope_scaling; None if not plain."""
    made, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    if made is not None and scaling:
        return None  # transformers decides
    if made is None:
        scaling = scaling or {"rope_type": "default"}
        made = {"rope_theta": raw.get("rope_theta"), **scaling} if isinstance(scaling, dict) else None
    if not isinstance(made, dict) or made.get("rope_type") not in ("default", "llama3"):
        return None
    return dict(made) if type(made.get("rope_theta")) in (int, float) else None
