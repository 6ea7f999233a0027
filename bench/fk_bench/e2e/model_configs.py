"""Configs of models without their weights: public sizes, folders, and the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastkernels.models.common.descriptions.registry import architectures, by_architecture, models
from fk_bench.core.hub import ModelError
from fk_bench.core.model_names import PUBLIC, check_name, first_layers, public_name, unknown


def load_config(model: str, quantized: bool = False) -> tuple[str, Any]:
    """(name, config as transformers has it) of a public model, its first layers as in jamba-v0.1:8, an architecture's
    short name (default sizes), a folder or file with a config.json, or a hub id, of which only the config is fetched.

    quantized  allow quantized weights

    Raises ModelError, and Unsupported for a quantization in a file of its own that cannot be read.
    """
    from fastkernels.models.common.checkpoints.quantization import with_own_file
    from fastkernels.models.common.configs.config import text_model

    path, public = Path(model).expanduser(), public_name(model)
    if public is not None:
        found = _public(public)
        _check_generates(model, found.architectures[0])
        return public, found
    whole, layers = first_layers(model)
    if layers is not None:
        from fastkernels.models.common.configs import shrunk

        _, found = load_config(whole)
        return model, shrunk.config_of(_cut(model, shrunk.fields(found), layers))
    if model in models() and not path.exists():
        kind = models()[model].arch.model_type
        _check_generates(model, models()[model].arch.names[0])
        return model, _of_type(kind, {})
    config = text_model(_read(model, path))
    folder = path.parent if path.is_file() else path
    if folder.is_dir():
        with_own_file(config, folder)
    if not quantized and getattr(config, "quantization_config", None):
        raise ModelError(f"{model} has quantized weights; only unquantized models are supported here")
    names = getattr(config, "architectures", None) or []
    if not names or names[0] not in by_architecture():
        what = names[0] if names else "no architecture"
        raise ModelError(
            f"{model} has {what}, which is not supported; known architectures: {', '.join(architectures())}"
        )
    _check_generates(model, names[0])
    return model, config


def sizes_of(model: str, folder: Path) -> str:
    """A folder with the config.json of a public model, if `model` is the name of one; else `model` itself.

    A name such as jamba-v0.1:8 is the model with its first 8 layers. Raises ModelError for more than it has.
    """
    whole, layers = first_layers(model)
    name = public_name(whole)
    if name is None:
        return model
    fields = _public(name).to_dict()
    if layers is not None:
        fields, name = _cut(model, fields, layers), f"{name}-{layers}-layers"
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(fields))
    return str(folder / name)


def _public(name: str) -> Any:
    """The config of a key of PUBLIC."""
    kind, sizes = PUBLIC[name]
    return _of_type(kind, {"tie_word_embeddings": False, "dtype": "bfloat16", **sizes})


def _cut(model: str, fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a config with the first layers only, of its text model if it has one within."""
    from fastkernels.models.common.configs import shrunk

    if isinstance(fields.get("text_config"), dict):
        return {**fields, "text_config": _cut(model, fields["text_config"], layers)}
    names = [name for name in shrunk.LAYERS if isinstance(fields.get(name), int)]
    if not names:
        raise ModelError(f"{model!r}: its config has no number of layers ({', '.join(shrunk.LAYERS)})")
    if layers > fields[names[0]]:
        raise ModelError(f"{model!r}: the model has {fields[names[0]]} layers")
    return shrunk.first(fields, names[0], layers)


def _check_generates(model: str, architecture: str) -> None:
    runner = by_architecture()[architecture].arch.runner
    if runner != "Generate":
        raise ModelError(
            f"{model} has the runner {runner!r}: only steps of models that generate are modelled"
        )


def _of_type(kind: str, fields: Mapping[str, Any]) -> Any:
    """The config with these fields; others have transformers' defaults."""
    from fastkernels.models.common.configs.config import of_type, plain

    names = [next(m.arch.names[0] for m in models().values() if m.arch.model_type == kind)]
    found = plain({**fields, "model_type": kind, "architectures": names})
    if found is not None:  # importing transformers takes seconds
        return found
    return of_type(kind, names, fields)


def _read(model: str, path: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
    from fastkernels.models.common.configs.checks import check_file
    from fastkernels.models.common.configs.config import from_transformers

    check_name(model)
    if path.is_file():
        path = path.parent
    name, _, revision = model.partition("@")
    try:
        if path.is_dir():
            check_file(path)
            return from_transformers(path)
        wanted = {"revision": revision} if revision else {}
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **wanted)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    except (
        OSError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, StrictDataclassError,
    ) as error:  # fmt: skip
        if path.is_dir():
            raise ModelError(
                f"{path / 'config.json'} cannot be used: {' '.join(str(error).split())}"
            ) from error
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{unknown(model)} The hub has no config for it: {why}") from error
