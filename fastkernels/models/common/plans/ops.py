"""The ops that a model runs: those of its modules' classes or `ops`, and the ops that these call by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastkernels.core import registry
from fastkernels.models.common.configs import config as config_file
from fastkernels.models.common.configs import shrunk, timm_config
from fastkernels.models.common.descriptions.registry import by_architecture, describe, find, load, models
from fastkernels.models.common.plans import build


def one_layer(model: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model on device 'meta' with its first layer, and with those up to its first experts if it has any.

    model  a model name ('llama') or an architecture, with sizes of its file or transformers' defaults; or a folder with
           config.json
    Raises UnknownName, CheckpointError.
    """
    if (Path(model) / "config.json").is_file():
        config = build.load_config(Path(model))
        config.num_hidden_layers = _layers(config)
        return build.skeleton(Path(model), config, dtype)
    found = models().get(model) or by_architecture().get(model)
    if found is None:
        raise registry.UnknownName("model", model, models())
    if found.arch.timm:
        name = next(iter(load(f"{found.module}:VARIANTS")))
        raw = {"architecture": name, "num_classes": 1000, "pretrained_cfg": {}}
        return build.skeleton(Path(), timm_config.parse(raw, Path("config.json")), dtype)
    if found.arch.folders:
        return build.skeleton(Path(), load(f"{found.module}:published")(), dtype)
    names, sizes = [found.arch.names[0]], dict(next(iter(found.arch.public.values()), {}))
    whole = config_file.of_type(found.arch.model_type, names, sizes)
    if "text_config" in sizes:
        sizes["text_config"] = {**sizes["text_config"], "num_hidden_layers": _layers(whole)}
    else:
        name = found.arch.sizes.get("num_hidden_layers", "num_hidden_layers")
        sizes = shrunk.first({name: getattr(whole, name, None), **sizes}, name, _layers(whole))
    config = config_file.of_type(found.arch.model_type, names, sizes)
    return build.skeleton(Path(), config, dtype)


def _layers(config: Any) -> int:
    """The number of first layers that have every kind of MLP."""
    if find(config.architectures[0]).arch.runner != "Generate":
        return 1
    kinds = [type(layer.mlp) for layer in describe(config).layers]
    return max(map(kinds.index, set(kinds))) + 1


def ops_of_model(model: str) -> list[str]:
    """The ops of the model with one layer, sorted by level and name. model: as in `one_layer`."""
    skeleton = one_layer(model)
    parts = [*skeleton.modules(), *(getattr(m, "quant_method", None) for m in skeleton.modules())]
    bases = {base for part in parts for base in type(part).__mro__}
    todo = [op for op in map(registry.op_of_class, bases) if op is not None]
    todo += [op for part in parts for op in getattr(part, "ops", ())]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += registry.get(name).calls
    return sorted(found, key=lambda name: (registry.get(name).level, name))
