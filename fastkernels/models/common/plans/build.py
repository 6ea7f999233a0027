"""Build a model from a checkpoint: config, device, dtype and weights."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastkernels.core import parallel
from fastkernels.core.registry import UnknownName
from fastkernels.models.common.checkpoints import checkpoint, quantization, quantized, scenes, weights
from fastkernels.models.common.configs import (
    checks,
    pipeline_folder,
    speech_config,
    timm_config,
    ultralytics_config,
)
from fastkernels.models.common.configs import config as config_file
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.registry import architectures, find, model_class
from fastkernels.models.common.layers.clamped_experts import ClampedExperts
from fastkernels.models.common.layers.cnn import Folded
from fastkernels.overrides.linear.parallel_linear import weights_as


def load_config(folder: Path) -> Any:
    """The checkpoint's transformers config, or an object with the same fields; see also weights.untie.

    No code of the checkpoint is run. Raises CheckpointError, and Unsupported for values that no model here can have.
    """
    if (pipeline := pipeline_folder.read(folder)) is not None:
        return pipeline
    if (scene := scenes.find(folder)) is not None:
        return config_file.of_scene(scene)
    if (speech := speech_config.read(folder)) is not None:
        checks.check(speech)
        return speech
    checks.check_file(folder)
    found = config_file.read(folder) or timm_config.read(folder) or ultralytics_config.read(folder)
    found = found or config_file.text_model(_from_transformers(folder))
    quantization.with_own_file(found, folder)
    names = getattr(found, "architectures", None) or []
    if not names or names[0] in architectures():  # sizes of others can have another meaning
        checks.check(found)
    if names and names[0] in architectures():
        arch = find(names[0]).arch
        weights.untie(found, folder, arch)
        _read_files(found, folder, arch)
    return found


def _read_files(config: Any, folder: Path, arch: Architecture) -> None:
    """Set the config fields of ARCH.heads and ARCH.settings, from files next to the weights. Raises CheckpointError."""
    if arch.heads:
        config.heads = [name for name in arch.heads if (folder / name).is_file()]
    for name, field in arch.settings.items():
        file = folder / name
        try:
            value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValueError as error:
            raise weights.CheckpointError(f"{file} is not JSON: {error}") from error
        if not isinstance(value, dict | None):
            raise weights.CheckpointError(f"{file} must hold a JSON object, got {value!r:.80}")
        setattr(config, field, value)


def _from_transformers(folder: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_file.from_transformers(folder)
    except (
        OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, StrictDataclassError,
    ) as error:  # fmt: skip
        why = _unknown_architecture(folder) or " ".join(str(error).split())
        raise weights.CheckpointError(f"{folder / 'config.json'} cannot be used: {why}") from error


def _unknown_architecture(folder: Path) -> str | None:
    """The advice about the checkpoint's architecture if there is no model of it here."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if isinstance(config, dict) and config.get("architectures"):
            find(config["architectures"][0])
    except UnknownName as error:
        return str(error)
    except ValueError:  # not JSON
        pass
    return None


def architecture_of(config: Any, folder: Path) -> str:
    """The first of the config's architectures. Raises CheckpointError if it has none."""
    names = getattr(config, "architectures", None) or []
    if not names:
        raise weights.CheckpointError(
            f"{folder / 'config.json'} has no `architectures`: it must be a list with the name of the"
            " model's class; `fk-bench list models` describes those that are supported"
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
    """This rank's shard of the model in eval mode. load_format: 'auto' (safetensors) or 'dummy' (random weights).

    Raises UnknownName, CheckpointError, and ValueError for sizes that cannot be sharded over the ranks or for too
    little device memory.
    """
    arch = find(architecture_of(config, folder)).arch
    if load_format == "auto":
        if arch.files:
            checkpoint.part_files(folder, arch.files)
        else:
            for part in arch.folders or (".",):
                weights.weight_files(folder / part)
    blank = skeleton(folder, config, dtype)
    if load_format == "auto":  # names and shapes, before a value is read
        weights.fill(blank, weights.tensors_of(folder, arch, config, "meta"), arch, config, folder)
    quantized.finish(blank)
    _check_room(blank, device)
    with (
        _defaults(dtype, device), torch.inference_mode(False), torch.no_grad(),
        weights_as(quantized.methods(config)),
    ):  # fmt: skip
        model = type(blank)(config)
        if load_format == "dummy":
            with parallel.build_as(0, 1):
                whole = skeleton(folder, config, dtype)
            weights.dummy(model, seed, {name: p.shape for name, p in whole.named_parameters()})
        else:
            weights.load(model, folder, arch, config)
        for module in list(model.modules()):
            if isinstance(module, ClampedExperts):
                module.loaded(dtype)
            elif isinstance(module, Folded):
                module.merge()
        quantized.finish(model)
    return model.eval().requires_grad_(False)


def skeleton(folder: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """This rank's shard of the model on device 'meta': shapes without memory."""
    cls = model_class(architecture_of(config, folder))
    try:
        with _defaults(dtype, torch.device("meta")), weights_as(quantized.methods(config)):
            return cls(config)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        # Without memory, only a size can fail: a negative one, or a product beyond 64 bits
        raise weights.CheckpointError(
            f"the config of {folder} has sizes that are not possible: {error}"
        ) from error


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers; tied ones count once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _check_room(model: nn.Module, device: torch.device) -> None:
    needed, free = weight_bytes(model), free_bytes(device)
    if free is not None and needed > free:
        size = parallel.get_tp_size()
        each = f" on each of {size} ranks" if size > 1 else ""
        raise ValueError(
            f"the weights need {needed / 2**30:.1f} GiB{each}, and {device} has {free / 2**30:.1f} GiB free: use a"
            " smaller model or dtype, a larger tensor_parallel_size, or free memory used by other processes"
        )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU with what PyTorch has reserved, or of this machine; None if it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
