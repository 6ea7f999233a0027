"""Pipelines with random weights from a folder that may hold configurations only: no weights, no tokenizer files."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

LEFT_OUT = ("Tokenizer", "TokenizerFast", "Processor", "FeatureExtractor")


def build(folder: Path, arguments: dict[str, Any]) -> Any:
    """The pipeline that model_index.json names, each module built from the configuration in its folder.

    Tokenizers and image processors are left out; they are None, as are parts that the index does not name. arguments:
    parts that are not built, and others of the constructor. Raises OSError or ValueError.
    """
    index = json.loads((folder / "model_index.json").read_text())
    import diffusers

    parts: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue
        library, kind = value
        parts[name] = None
        if library is not None and name not in arguments and not kind.endswith(LEFT_OUT):
            parts[name] = _part(getattr(importlib.import_module(library), kind), folder / name)
    options = {k: v for k, v in index.items() if not k.startswith("_") and not isinstance(v, list)}
    cls = getattr(diffusers, index["_class_name"])
    known = inspect.signature(cls.__init__).parameters.values()
    parts = {**{p.name: None for p in known if p.default is p.empty and p.name != "self"}, **parts}
    return cls(**{k: v for k, v in parts.items() if k not in arguments}, **options, **arguments)


def _part(cls: Any, folder: Path) -> Any:
    if hasattr(cls, "from_config") and hasattr(cls, "load_config"):  # diffusers
        return cls.from_config(cls.load_config(folder))
    return cls(cls.config_class.from_pretrained(folder))
