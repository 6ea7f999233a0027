"""Read the config.json of YOLO checkpoints, which names a model of ultralytics as its `model`.

It has `model`, such as "yolov10n.yaml", `names`, {class: its name}, and may have `imgsz`, the longer side of images in
pixels. The weights are the model's state dict, before or after its norms were fused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.models.common import checkpoint, cnn
from fastkernels.models.common.checkpoint import CheckpointError
from fastkernels.models.common.config import PlainConfig

NAME = re.compile(r"yolov10([a-z])(\.yaml|\.pt)?")
SCALES = ("n", "s", "m", "b", "l", "x")
MOST_PIXELS = 8192  # of a side


@dataclass(frozen=True)
class Letterbox:
    """How images become a model's pixels: see engine/letterbox.py."""

    size: int = 640
    stride: int = cnn.PATCH
    fill: int = 114


def read(folder: Path) -> PlainConfig | None:
    """The config of a folder with a YOLOv10 checkpoint, else None. Raises CheckpointError for fields that are wrong."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or "architectures" in raw or "model_type" in raw:
        return None
    name = raw.get("model")
    if not isinstance(name, str) or not name.startswith("yolov10"):
        return None
    try:
        found = PlainConfig(**{**fields(raw), "dtype": "float32"})
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    with contextlib.suppress(CheckpointError):  # loading describes it
        found.fused = not any(".bn." in key for key in checkpoint.keys(folder))
    return found


def fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config from those of a config.json. Raises ValueError."""
    found = NAME.fullmatch(str(raw.get("model")))
    if found is None or found[1] not in SCALES:
        names = ", ".join(f"yolov10{scale}.yaml" for scale in SCALES)
        raise ValueError(f"model={raw.get('model')!r} is not supported, only {names}")
    if raw.get("task", "detect") != "detect":
        raise ValueError(f"task={raw['task']!r} is not supported, only 'detect'")
    names = raw.get("names")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if (
        not isinstance(names, dict)
        or sorted(map(str, names)) != sorted(map(str, range(len(names))))
        or not names
    ):
        raise ValueError(f"names={names!r:.80} must give each class from 0 on a name")
    size = raw.get("imgsz", Letterbox.size)
    if type(size) is not int or size % cnn.PATCH or not 0 < size <= MOST_PIXELS:
        raise ValueError(f"imgsz={size!r} is not a multiple of {cnn.PATCH} from {cnn.PATCH} to {MOST_PIXELS}")
    return {
        "architectures": ["YOLOv10"], "model_type": "yolov10", "model": raw["model"], "scale": found[1],
        "names": {int(i): str(name) for i, name in names.items()},
        "id2label": {int(i): str(name) for i, name in names.items()},
        "imgsz": size, "fused": bool(raw.get("fused", False)), "num_channels": 3, "image_size": size,
        "patch_size": cnn.PATCH, "preprocessing": Letterbox(size), "quantization_config": None,
    }  # fmt: skip
