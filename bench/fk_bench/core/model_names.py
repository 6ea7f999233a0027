"""Names of models: public sizes, folders and ids of the hub. Neither torch nor transformers is imported."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from fastkernels.models.common.descriptions.registry import models
from fk_bench.core import hub
from fk_bench.core.hub import ModelError

# {short name: (model type, fields)}: sizes that the model files list, for machines without access to the hub.
PUBLIC: dict[str, tuple[str, dict[str, Any]]] = {
    hub_id.rpartition("/")[2].lower(): (m.arch.model_type, dict(fields))
    for m in models().values()
    for hub_id, fields in m.arch.public.items()
}
_HUB_NAMES = {
    hub_id.rpartition("/")[2].lower(): hub_id.rpartition("/")[2]
    for m in models().values()
    for hub_id in m.arch.public
}
SCENES = {".ply", ".ingp", ".msgpack"}  # files of models/common/checkpoints/scenes.py, which imports torch
_OWNERS = {"", *(hub_id.partition("/")[0].lower() for m in models().values() for hub_id in m.arch.public)}


def public_name(model: str) -> str | None:
    """The key of PUBLIC for a name like 'meta-llama/Llama-3.1-8B-Instruct'; None for other names and for paths."""
    owner, _, last = model.strip().rpartition("/")
    name = last.lower()
    short = re.sub(r"(-(instruct|base|chat|hf))?(-v[\d.]+)?$", "", name)
    public = next((known for known in (name, short, f"{short}-instruct") if known in PUBLIC), name)
    known = public in PUBLIC and owner.lower() in _OWNERS and not Path(model).expanduser().exists()
    return public if known else None


def first_layers(model: str) -> tuple[str, int | None]:
    """(name, layers) of a name like 'jamba-v0.1:8', the first 8 layers of a public model; None: all of them.

    Raises ModelError for layers that are no number from 1.
    """
    name, colon, layers = model.strip().rpartition(":")
    if not colon or public_name(name) is None:
        return model, None
    if not layers.isdecimal() or int(layers) < 1:
        raise ModelError(f"{model!r}: give a number of layers, at least 1, as in {name}:8")
    return name, int(layers)


def hub_name(model: str) -> str:
    """The name on the hub of a key of PUBLIC, such as Llama-3.2-3B; other names unchanged."""
    return _HUB_NAMES.get(model, model)


def is_model(word: str) -> bool:
    """Whether a word names a model, not an op: ops are named in lower case, digits and underscores."""
    known = word in models() or public_name(word) is not None or Path(word).expanduser().exists()
    return known or not word.replace("_", "").isalnum()


def check_name(model: str) -> None:
    """Raise ModelError for a name that `load_config` cannot resolve, without importing torch or transformers."""
    path, (name, _) = Path(model).expanduser(), first_layers(model)
    if public_name(name) is not None or path.is_file() or (model in models() and not path.exists()):
        return
    if path.is_dir():
        if (path / "model_index.json").is_file() and not (path / "config.json").is_file():
            raise ModelError(
                f"{path} is a pipeline of diffusers: only steps of models that generate are modelled"
            )
        if not (path / "config.json").is_file():
            if any(file.suffix in SCENES for file in path.iterdir()):
                raise ModelError(f"{path} is a scene: only steps of models that generate are modelled")
            raise ModelError(
                f"{path} has no config.json: give the folder of a checkpoint, or of a config alone"
            )
        return
    if not hub.is_id(model):
        raise ModelError(unknown(model))
    try:
        hub.check(model)
    except ModelError as error:
        raise ModelError(f"{error} {unknown(model)}") from error


def unknown(model: str) -> str:
    """The message for a name that is no model: the closest known ones, or a few."""
    close = difflib.get_close_matches(model.lower().rpartition("/")[2], [*PUBLIC, *models()], n=3, cutoff=0.7)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    some = ", ".join(name for name in PUBLIC if name.startswith(("llama-3", "qwen3-8", "gpt-oss")))
    return (
        f"unknown model {model!r}.{hint} Give a folder with a config.json, a hub id OWNER/NAME, a public model's name"
        f" ({some}, ...), or an id of `fk-bench list models`."
    )
