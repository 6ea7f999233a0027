"""Weights from safetensors, streamed shard by shard into the model's parameters.

A checkpoint's q_proj, k_proj, v_proj become one qkv_proj: the model's `packed_modules_mapping` says which
names are parts of which, and the parameter's own `weight_loader` knows where a part goes. Experts that are one
stacked parameter here and a matrix each there are named by the model's `get_expert_mapping()`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file, and the keys where it is about keys."""


def resolve(model: str) -> Path:
    """The folder of a checkpoint: `model` itself, or the snapshot of a hub id. Raises CheckpointError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model {model!r} is neither a folder nor a hub id (OWNER/NAME)")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"])
        )
    except Exception as error:
        raise CheckpointError(
            f"model {model!r} is no folder, and the hub does not give it: {error}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order. Raises CheckpointError that names what is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are not in {folder}: {', '.join(missing)}")
    if not files:
        raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")
    return files


def iterate(files: list[Path]) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """(file, key, tensor on the CPU) of every tensor; one tensor is in memory at a time."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(str(file), framework="pt", device="cpu") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - a safe_open object is no dict
                    yield file, key, tensors.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read, it may be truncated: {error}") from error


def load(model: nn.Module, folder: Path) -> None:
    """Fill every parameter of the model from the checkpoint. Raises CheckpointError for missing or leftover keys.

    The model may have `packed_modules_mapping` {ours: [theirs, ...]} and `ignored_weights(key) -> bool` for keys
    that a checkpoint may carry without use (a tied output projection, a rope table), and `get_expert_mapping()`, vLLM's
    list of (our name's part, key's part, expert_id, shard_id).
    """
    parameters = dict(model.named_parameters())
    packed = packed_parts(getattr(model, "packed_modules_mapping", {}))
    packed.update(expert_parts(getattr(model, "get_expert_mapping", list)()))
    ignored = getattr(model, "ignored_weights", lambda key: False)
    todo = {name: _parts_of(name, packed) for name in parameters}
    leftover: list[str] = []
    for file, key, tensor in iterate(weight_files(folder)):
        if ignored(key):
            continue
        name, shard = _rename(key, packed)
        if name not in parameters or shard not in todo[name]:
            leftover.append(f"{key} ({file.name})")
            continue
        _load_one(parameters[name], tensor, shard, file, key)
        todo[name].discard(shard)
    missing = sorted(
        _checkpoint_key(name, shard, packed) for name, shards in todo.items() for shard in shards
    )
    problems = []
    if missing:
        problems.append(f"keys missing from it: {_some(missing)}")
    if leftover:
        problems.append(f"keys that the model does not have: {_some(sorted(leftover))}")
    if problems:
        raise CheckpointError(f"{folder} does not fit {type(model).__name__}: " + "; ".join(problems))


# What a packed parameter's weight_loader calls a part: (shard_id, expert_id) of stacked experts; None: the whole.
Shard: TypeAlias = "str | int | tuple[str, int] | None"


def packed_parts(mapping: Mapping[str, list[str]]) -> dict[str, tuple[str, Shard]]:
    """{their module name: (our module name, shard id)}. Shard ids are vLLM's: 'q', 'k', 'v', or 0, 1, ..."""
    parts: dict[str, tuple[str, Shard]] = {}
    for ours, theirs in mapping.items():
        for i, part in enumerate(theirs):
            parts[part] = (ours, part[0] if ours == "qkv_proj" else i)
    return parts


def expert_parts(mapping: Iterable[tuple[str, str, int, str]]) -> dict[str, tuple[str, Shard]]:
    """The same for vLLM's expert mapping: {'experts.3.w1.weight': ('experts.w13_weight', ('w1', 3))}."""
    return {f"{theirs}weight": (f"{ours}weight", (shard, expert)) for ours, theirs, expert, shard in mapping}


def _rename(key: str, packed: Mapping[str, tuple[str, Shard]]) -> tuple[str, Shard]:
    pieces = key.split(".")
    for i in range(len(pieces)):
        for n in (1, 4):  # a module, or an expert's parameter: experts.N.w1.weight
            found = packed.get(".".join(pieces[i : i + n]))
            if found is not None:
                return ".".join([*pieces[:i], found[0], *pieces[i + n :]]), found[1]
    return key, None


def _parts_of(name: str, packed: Mapping[str, tuple[str, Shard]]) -> set[Shard]:
    return {shard for ours, shard in packed.values() if f".{ours}." in f".{name}."} or {None}


def _checkpoint_key(name: str, shard: Shard, packed: Mapping[str, tuple[str, Shard]]) -> str:
    for theirs, (ours, part) in packed.items():
        if part == shard and f".{ours}." in f".{name}.":
            return f".{name}.".replace(f".{ours}.", f".{theirs}.")[1:-1]
    return name


def _load_one(parameter: nn.Parameter, tensor: torch.Tensor, shard: Shard, file: Path, key: str) -> None:
    loader: Any = getattr(parameter, "weight_loader", None)
    try:
        if loader is None:
            if parameter.shape != tensor.shape:
                raise ValueError(f"shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
            parameter.data.copy_(tensor)
        elif shard is None:
            loader(parameter, tensor)
        elif isinstance(shard, tuple):
            loader(parameter, tensor, key, *shard)
        else:
            loader(parameter, tensor, shard)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"{file}: {key} of shape {tuple(tensor.shape)} does not fit: {error}"
        ) from error


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def dummy(model: nn.Module, seed: int) -> None:
    """Random weights: matrices N(0, 0.02), vectors (norms) 1, biases 0. The same for a seed and device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif parameter.dim() < 2:
            parameter.data.fill_(1.0)
        else:
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            parameter.data.normal_(0.0, 0.02, generator=generator)
