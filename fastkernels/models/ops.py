"""Which ops an architecture's path uses: those of its modules, and what these call by name."""

from __future__ import annotations

from pathlib import Path

import torch

from fastkernels import registry

from . import build
from .registry import ARCHITECTURES


def model_names() -> dict[str, str]:
    """{short name: architecture}: the stem of the architecture's file, as `llama`."""
    return {where.partition(":")[0].rpartition(".")[2]: name for name, where in ARCHITECTURES.items()}


def ops_of_model(model: str) -> list[str]:
    """The ops of one layer's path and of what is around it, by level and name. model: 'llama' or an architecture.

    The model is built with one layer of its config's default sizes, without memory. Raises UnknownName.
    """
    from transformers import AutoConfig

    names = model_names()
    short = {architecture: name for name, architecture in names.items()}.get(model, model)
    if short not in names:
        raise registry.UnknownName("model", model, names)
    config = AutoConfig.for_model(short, num_hidden_layers=1)
    config.architectures = [names[short]]
    skeleton = build.skeleton(Path(), config, torch.bfloat16)
    parts = [*skeleton.modules(), *(getattr(m, "quant_method", None) for m in skeleton.modules())]
    bases = {base for part in parts for base in type(part).__mro__}
    stems = {base.__module__: base.__module__.rpartition(".")[2] for base in bases}
    modules = registry.op_modules()
    todo = [stem for module, stem in stems.items() if modules.get(stem) == module]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += registry.get(name).calls
    return sorted(found, key=lambda name: (registry.get(name).level, name))
