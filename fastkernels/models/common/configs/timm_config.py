"""Read timm's config.json, which names a model of timm as its `architecture` and says how to prepare images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.config import PlainConfig
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.layers import cnn

MODES = ("center", "squash")
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")  # as Pillow has them
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """How images become a model's pixels: resized to size / crop_pct, cropped to size, and normalized.

    mode  'center' keeps an image's aspect ratio, 'squash' makes it square
    """

    size: int
    crop_pct: float = 0.875
    mode: str = "center"
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD


def read(folder: Path) -> PlainConfig | None:
    """The config of a folder with a checkpoint of timm, else None.

    Raises UnknownName for a model that no file describes, and CheckpointError for fields that cannot be used.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    name = raw.get("architecture") if isinstance(raw, dict) else None
    if not isinstance(name, str) or "architectures" in raw or "model_type" in raw:
        return None
    return parse(raw, file)


def parse(raw: dict[str, Any], file: Path) -> PlainConfig:
    """The config of the content of timm's config.json. Raises as `read` does; messages name the file."""
    name = raw["architecture"]
    found = [m for m in registry.models().values() if m.arch.timm and name.startswith(m.arch.timm)]
    arch = found[0].arch if found else registry.find(name).arch
    given = raw.get("pretrained_cfg")
    if not isinstance(given, dict) or not isinstance(raw.get("model_args", {}), dict):
        raise CheckpointError(f"{file}: pretrained_cfg and model_args must be tables of fields")
    arguments = dict(raw.get("model_args", {}))  # timm writes some fields of the config here, too
    own = {
        n: raw.get(n, given.get(n, default)) for n, default in (("num_classes", 0), ("global_pool", "avg"))
    }
    for key, value in (*own.items(), ("in_chans", 3)):
        if (other := arguments.pop(key, value)) != value:
            raise CheckpointError(f"{file}: model_args has {key}={other!r}, and {value!r} is expected")
    classes = own["num_classes"]
    if type(classes) is not int or classes < 0:
        raise CheckpointError(f"{file}: num_classes={classes!r} is not a number of classes")
    channels, rows, columns = _numbers(file, "input_size", given.get("input_size", (3, 224, 224)), 3)
    if channels != 3 or rows != columns or rows < 1 or type(rows) is not int:
        raise CheckpointError(f"{file}: input_size={given['input_size']!r} is not supported, only [3, N, N]")
    return PlainConfig(
        architectures=[arch.names[0]],
        model_type=arch.model_type,
        architecture=name,
        model_args=arguments,
        global_pool=own["global_pool"],
        num_labels=classes,
        id2label=_labels(raw.get("label_names", given.get("label_names"))),
        num_channels=channels,
        image_size=rows,
        patch_size=cnn.PATCH,
        dtype="float32",
        preprocessing=_preprocessing(file, given, rows),
    )


def _preprocessing(file: Path, given: dict[str, Any], size: int) -> Preprocessing:
    mode, interpolation = given.get("crop_mode", "center"), given.get("interpolation", "bicubic")
    for name, value, allowed in (("crop_mode", mode, MODES), ("interpolation", interpolation, FILTERS)):
        if value not in allowed:
            raise CheckpointError(f"{file}: {name}={value!r} is not supported, only {', '.join(allowed)}")
    (part,) = _numbers(file, "crop_pct", [given.get("crop_pct", 0.875)], 1)
    mean, std = (
        _numbers(file, name, given.get(name, value), 3) for name, value in (("mean", MEAN), ("std", STD))
    )
    if not 0 < part <= 1 or min(std) <= 0:
        raise CheckpointError(f"{file}: crop_pct={part} must be in (0, 1], and std={std} above 0")
    return Preprocessing(size, part, mode, interpolation, mean, std)


def _numbers(file: Path, name: str, value: Any, count: int) -> tuple[Any, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != count
        or not all(type(n) in (int, float) for n in value)
    ):
        raise CheckpointError(f"{file}: {name}={value!r} is not {count} numbers")
    return tuple(value)


def _labels(names: Any) -> dict[int, str] | None:
    """{class: its name} from timm's list or table of names."""
    if isinstance(names, dict):
        return {int(i): str(name) for i, name in names.items()}
    return dict(enumerate(map(str, names))) if isinstance(names, (list, tuple)) else None
