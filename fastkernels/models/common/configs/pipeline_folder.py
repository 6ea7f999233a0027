"""Read the folder of a diffusers pipeline: model_index.json, and a config in the folder of each part."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastkernels.models.common.checkpoints import checkpoint
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.configs.config import PlainConfig
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.description import Unsupported

CONFIGS = ("config.json", "scheduler_config.json", "guider_config.json")


def read(folder: Path) -> PlainConfig | None:
    """The config of a pipeline; None for a folder without model_index.json, or with a config.json.

    architectures  [the pipeline's class], as model_index.json names it
    classes        {part: its class}, for parts that the pipeline has
    parts          {part: the fields of its config}, for parts with one
    options        the pipeline's own settings
    dtype          of the first weight of the denoiser

    Raises CheckpointError, and UnknownName for a pipeline that no model file describes.
    """
    file = folder / checkpoint.PIPELINE
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    index = _table(file)
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise CheckpointError(f"{file} names no pipeline: _class_name is {name!r}")
    arch = registry.find(name).arch
    classes = {
        part: value[1]
        for part, value in index.items()
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)
    }
    files = {part: [folder / part / config for config in CONFIGS] for part in classes}
    parts = {part: _table(found) for part, each in files.items() for found in each if found.is_file()}
    if missing := [part for part in (*arch.folders, "scheduler") if part not in parts]:
        raise CheckpointError(f"{folder} lacks the config of {', '.join(missing)}, which {name} needs")
    return PlainConfig(
        architectures=[name], model_type=arch.model_type, classes=classes, parts=parts,
        options={k: v for k, v in index.items() if not isinstance(v, list) and not k.startswith("_")},
        dtype=_dtype(folder / arch.folders[0]),
    )  # fmt: skip


def _table(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {found!r:.80}")
    return found


def _dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the first weight; None without weights, which are then random."""
    try:
        for _, _, read_tensor in checkpoint.iterate(folder, "meta"):
            return read_tensor().dtype
    except CheckpointError:
        return None  # loading describes the problem
    return None


def fields(
    config: Any, part: str, classes: tuple[str, ...], defaults: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]
) -> SimpleNamespace:  # fmt: skip
    """The fields of a part's config.

    classes   those that compute what ours does
    defaults  fields that may have any value, and the value of a config without them
    fixed     {field: supported values}; the first one is the default

    Raises Unsupported for another class, for a field of neither kind, and for another value of a fixed one.
    """
    given = {k: _plain(v) for k, v in config.parts.get(part, {}).items() if not k.startswith("_")}
    if (cls := config.classes.get(part)) not in classes:
        raise Unsupported(f"{part}: the class {cls!r} is not supported, only {', '.join(classes)}")
    for name, value in given.items():
        if name in fixed and value not in fixed[name]:
            allowed = " or ".join(map(repr, fixed[name]))
            raise Unsupported(f"{part}: {name}={value!r} is not supported, only {allowed}")
        if name not in fixed and name not in defaults and value is not None:
            raise Unsupported(f"{part}: {name}={value!r} is not supported: {cls} here has no such field")
    for name, value in given.items():
        if name in defaults and not _suits(value, defaults[name]):
            raise Unsupported(
                f"{part}: {name}={value!r} is not supported, only values such as {defaults[name]!r}"
            )
    known = {name: given[name] for name in given if name in defaults or name in fixed}
    return SimpleNamespace(**{**{n: values[0] for n, values in fixed.items()}, **defaults, **known})


def _suits(value: Any, default: Any) -> bool:
    """Whether a field may have this value: one of the default's kind, and positive if the default is.

    A number may be one for each level. Any value suits the default None.
    """
    if default is None:
        return True
    if isinstance(value, tuple):
        return type(default) is not bool and (bool(value) or default == ()) and not isinstance(default, str)
    if type(default) in (int, float):
        return type(value) in (int, float) and math.isfinite(value) and (value > 0 or default <= 0)
    return type(value) is type(default)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value
