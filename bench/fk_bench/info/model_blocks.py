"""The blocks of the model that a command names: levels 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fastkernels.models.common.descriptions.registry import by_architecture, models
from fk_bench.core.model_names import PUBLIC, public_name


def config_of(model: str) -> Any:
    """The config of an architecture's name (sizes of its file, or transformers' defaults), a public name or a folder.

    Raises UnknownName, CheckpointError, and Unsupported for a model that does not read tokens or images.
    """
    from fastkernels.models.common.configs import shrunk
    from fastkernels.models.common.plans import build

    if Path(model).expanduser().exists():
        return build.load_config(Path(model).expanduser())
    public, found = public_name(model), models().get(model) or by_architecture().get(model)
    if found is None and public is None:
        raise registry.UnknownName("model", model, [*models(), *PUBLIC])
    if found is not None and public is None and (folder := _of_suite(found.name)) is not None:
        return build.load_config(folder)
    if found is not None:
        kind, sizes = found.arch.model_type, dict(next(iter(found.arch.public.values()), {}))
    else:
        kind, sizes = PUBLIC[str(public)]
        found = next(m for m in models().values() if m.arch.model_type == kind)
    names = [found.arch.names[0]]
    return shrunk.config_of({"dtype": "bfloat16", **sizes, "model_type": kind, "architectures": names})


def _of_suite(name: str) -> Path | None:
    """The folder with the configuration that the suite `full` gives a model of another runner than Generate."""
    from fk_bench.evaluate import checkpoints, suites

    if models()[name].arch.runner == "Generate" or models()[name].arch.public:
        return None
    entries = suites.load("full").entries
    found = next(
        (e for e in entries if e.workload.kind == "requests" and suites.architecture_of(e.model) == name),
        None,
    )
    return None if found is None else checkpoints.folder(found.model, "requests")


def register(model: str) -> tuple[str, tuple[str, ...]]:
    """(the model's text, the names of its blocks), which the registry then knows.

    Raises UnknownName, CheckpointError, and Unsupported for a model without a block that can be judged.
    """
    from fastkernels.models.common.plans import block_tasks

    return block_tasks.register_model(config_of(model))


def model_of(names: Sequence[str]) -> str:
    """The model of a block's name, MODEL.KIND; '' if there is no such name."""
    return next((n.partition(".")[0] for n in names if n.partition(".")[0] in models() and "." in n), "")


def of_level(names: Sequence[str], levels: Sequence[int]) -> list[str]:
    return [n for n in names if registry.get(n).level in levels]
