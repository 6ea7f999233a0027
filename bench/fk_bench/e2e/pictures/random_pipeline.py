"""Pipelines with random weights from a folder that may hold configurations only: no weights, no tokenizer files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

LEFT_OUT = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor")


def build(folder: Path, arguments: dict[str, Any]) -> Any:
    """The pipeline that model_index.json names, each module built from the configuration in its folder.

    Tokenizers and image processors are left out; they are None. Raises OSError or ValueError.
    """
    index = json.loads((folder / "model_index.json").read_text())
    import diffusers

    parts: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue
        library, kind = value
        parts[name] = None
        if library is not None and not kind.endswith(LEFT_OUT):
            parts[name] = _part(getattr(importlib.import_module(library), kind), folder / name)
    options = {k: v for k, v in index.items() if not k.startswith("_") and not isinstance(v, list)}
    return getattr(diffusers, index["_class_name"])(**parts, **options, **arguments)


def _part(cls: Any, folder: Path) -> Any:
    if hasattr(cls, "from_config") and hasattr(cls, "load_config"):  # diffusers
        return cls.from_config(cls.load_config(folder))
    return cls(cls.config_class.from_pretrained(folder))
