"""Which ops an architecture's path uses: those of its modules, and what these call by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fastkernels.core import registry
from fastkernels.models.common import build
from fastkernels.models.common.registry import ARCHITECTURES


def model_names() -> dict[str, str]:
    """{short name: architecture}: the stem of the architecture's file, as `llama`."""
    return {where.partition(":")[0].rpartition(".")[2]: name for name, where in ARCHITECTURES.items()}


def one_layer(model: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model with one layer, without memory. model: 'llama' or an architecture, which has its config's default sizes,
    or a folder with config.json. Raises UnknownName, CheckpointError.
    """
    from transformers import AutoConfig

    if (Path(model) / "config.json").is_file():
        config = build.load_config(Path(model))
        config.num_hidden_layers = 1
        return build.skeleton(Path(model), config, dtype)
    names = model_names()
    short = {architecture: name for name, architecture in names.items()}.get(model, model)
    if short not in names:
        raise registry.UnknownName("model", model, names)
    config = AutoConfig.for_model(short, num_hidden_layers=1)
    config.architectures = [names[short]]
    return build.skeleton(Path(), config, dtype)


def ops_of_model(model: str) -> list[str]:
    """The ops of one layer's path and of what is around it, by level and name. model: as in `one_layer`."""
    skeleton = one_layer(model)
    parts = [*skeleton.modules(), *(getattr(m, "quant_method", None) for m in skeleton.modules())]
    bases = {base for part in parts for base in type(part).__mro__}
    todo = [op for op in map(registry.op_of_class, bases) if op is not None]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += registry.get(name).calls
    return sorted(found, key=lambda name: (registry.get(name).level, name))
