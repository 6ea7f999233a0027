"""A model from a checkpoint's config: on its device, in its dtype, with its weights."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import weights
from .registry import architectures, model_class


def load_config(folder: Path) -> Any:
    """The checkpoint's transformers config. Raises CheckpointError that names the file."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise weights.CheckpointError(f"{folder / 'config.json'} cannot be used: {error}") from error


def architecture_of(config: Any, folder: Path) -> str:
    """The first of the config's architectures. Raises CheckpointError if it has none."""
    names = getattr(config, "architectures", None) or []
    if not names:
        raise weights.CheckpointError(
            f"{folder / 'config.json'} has no `architectures`; known: {', '.join(architectures())}"
        )
    return names[0]


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device):  # type: ignore[no-untyped-def]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)


def build(
    folder: Path,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> nn.Module:
    """The model in eval mode. load_format: 'auto' (safetensors) or 'dummy'. Raises UnknownName, CheckpointError."""
    cls = model_class(architecture_of(config, folder))
    if load_format == "auto":
        weights.weight_files(folder)
    with _defaults(dtype, device), torch.inference_mode(False), torch.no_grad():
        model = cls(config)
        if load_format == "dummy":
            weights.dummy(model, seed)
        else:
            weights.load(model, folder)
    return model.eval().requires_grad_(False)
