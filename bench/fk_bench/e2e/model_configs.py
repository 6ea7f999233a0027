"""Configs of models without their weights: public sizes, folders, and the hub."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from fastkernels.models.common.ops import model_names
from fastkernels.models.common.registry import ARCHITECTURES, architectures

# Sizes of public models, for machines without access to the hub and for gated repositories.
_LLAMA: dict[str, Any] = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
PUBLIC: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {  # type, sizes in the order of _SIZES, other fields
    "llama-3.1-8b": ("llama", (4096, 14336, 32, 32, 8), _LLAMA),
    "llama-3.1-70b": ("llama", (8192, 28672, 80, 64, 8), _LLAMA),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8), {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8), {**_QWEN, "tie_word_embeddings": True}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8), _QWEN),
    "qwen3-32b": ("qwen3", (5120, 25600, 64, 64, 8), _QWEN),
    "mixtral-8x7b": (
        "mixtral", (4096, 14336, 32, 32, 8),
        {"vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_OWNERS = ("", "meta-llama", "qwen", "mistralai")


class ModelError(ValueError):
    """A model without a usable config; the message says why, and what to give instead."""


def public_name(model: str) -> str | None:
    """The key of PUBLIC for a name like 'meta-llama/Llama-3.1-8B-Instruct'; None for other names and for paths."""
    owner, _, last = model.strip().rpartition("/")
    public = re.sub(r"(-(instruct|base|chat|hf))?(-v[\d.]+)?$", "", last.lower())
    known = public in PUBLIC and owner.lower() in _OWNERS and not Path(model).expanduser().exists()
    return public if known else None


def load_config(model: str) -> tuple[str, Any]:
    """(name, transformers config) of a public model, an architecture's short name (default sizes), a folder or file
    with a config.json, or a hub id, of which only the config is fetched. Raises ModelError.
    """
    from transformers import AutoConfig

    path, public = Path(model).expanduser(), public_name(model)
    if public is not None:
        kind, sizes, rest = PUBLIC[public]
        fields = {
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **dict(zip(_SIZES, sizes, strict=True)),
            **rest,
        }
        return public, _typed(AutoConfig.for_model(kind, **fields), kind)
    if model in model_names() and not path.exists():
        return model, _typed(AutoConfig.for_model(model), model)
    config = _read(model, path)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{model} has quantized weights; only unquantized models are supported here")
    names = getattr(config, "architectures", None) or []
    if not names or names[0] not in ARCHITECTURES:
        what = names[0] if names else "no architecture"
        raise ModelError(
            f"{model} has {what}, which is not supported; known architectures: {', '.join(architectures())}"
        )
    return model, config


def _typed(config: Any, kind: str) -> Any:
    config.architectures = [model_names()[kind]]
    return config


def _read(model: str, path: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if path.is_file():
        path = path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: give the folder of a checkpoint, or of a config alone")
    if not path.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", model):
        raise ModelError(_unknown(model))
    name, _, revision = model.partition("@")
    try:
        if path.is_dir():
            return AutoConfig.from_pretrained(path, local_files_only=True)
        return AutoConfig.from_pretrained(name, **({"revision": revision} if revision else {}))
    except (OSError, ValueError, KeyError, StrictDataclassError, json.JSONDecodeError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if path.is_dir():
            raise ModelError(f"{path / 'config.json'} cannot be used: {why}") from error
        raise ModelError(f"{_unknown(model)} The hub has no config for it: {why}") from error


def _unknown(model: str) -> str:
    known = [*PUBLIC, *model_names()]
    close = difflib.get_close_matches(model.lower().rpartition("/")[2], known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    forms = "a folder with a config.json, a hub id OWNER/NAME, or one of"
    return f"unknown model {model!r}.{hint} Give {forms} {', '.join(known)}."
