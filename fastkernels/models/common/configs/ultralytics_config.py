"""Read the config.json of ultralytics' checkpoints, which names a model as its `model` and has no `architectures`.

The model file's ARCH.ultralytics has the prefixes of that name, and its ARCH.own_config makes the other fields. The
weights are the model's state dict, before or after its norms were fused; `fused` of the config says which.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints import checkpoint
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.config import PlainConfig
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.layers import cnn


@dataclass(frozen=True)
class Letterbox:
    """How images become a model's pixels: see engine/inputs/letterbox.py."""

    size: int = 640
    stride: int = cnn.PATCH
    fill: int = 114


def read(folder: Path) -> PlainConfig | None:
    """The config of a folder with such a checkpoint, else None. Raises CheckpointError for fields that are wrong."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or "architectures" in raw or "model_type" in raw:
        return None
    name: Any = raw.get("model")
    found = [m.arch for m in registry.models().values() if m.arch.ultralytics]
    arch = next((a for a in found if isinstance(name, str) and name.startswith(a.ultralytics)), None)
    if arch is None:
        return None
    try:
        config = PlainConfig(**{**registry.load(arch.own_config)(raw), "dtype": "float32"})
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    with contextlib.suppress(CheckpointError):  # loading describes it
        config.fused = not any(".bn." in key for key in checkpoint.keys(folder))
    return config
