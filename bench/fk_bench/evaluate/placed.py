"""Whether a candidate for a block of a model has a place in a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fk_bench.evaluate.reasons import Reason


def model_of(folder: str) -> tuple[str, Any]:
    """(our name of a checkpoint's model, its config); '' and None if we have none, as for models of timm."""
    from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
    from fastkernels.models.common.descriptions import registry as architectures
    from fastkernels.models.common.plans import build

    try:
        config = build.load_config(Path(folder))
        return architectures.find(build.architecture_of(config, Path(folder)), config).name, config
    except (CheckpointError, LookupError, OSError, ValueError):
        return "", None


def place(block: str, host: str, folder: str) -> tuple[Reason, str] | None:
    """Why a block, MODEL.KIND, has no place in a host that runs this checkpoint; None if it has one.

    Our engine's registry then knows the blocks of the model.
    """
    model = block.partition(".")[0]
    own, config = model_of(folder)
    if own != model:
        return Reason.UNUSED, f"it is a block of {model}, and this item runs {own or Path(folder).name}"
    if host != "fastkernels":
        return (
            Reason.NOT_DEPLOYED,
            f"it is a block of our engine's {model}; {host} runs its own classes there",
        )
    from fastkernels.models.common.descriptions.description import Unsupported
    from fastkernels.models.common.plans import block_tasks

    try:
        _, names = block_tasks.register_model(config)
    except Unsupported as error:
        return Reason.UNUSED, str(error)
    return None if block in names else (Reason.UNUSED, f"{model} has the blocks {', '.join(names)}")
