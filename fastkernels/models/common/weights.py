"""Weights from safetensors, streamed shard by shard into the model's parameters.

A checkpoint's q_proj, k_proj, v_proj become one qkv_proj: the model's `packed_modules_mapping` says which
names are parts of which, and the parameter's own `weight_loader` knows where a part goes. Experts that are one
stacked parameter here and a matrix each there are named by the model's `get_expert_mapping()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fastkernels.models.common.checkpoint import CheckpointError, iterate, resolve, some, weight_files

__all__ = ["CheckpointError", "dummy", "load", "resolve", "weight_files"]
# What a parameter may be loaded from: other dtypes are of quantized checkpoints, whose values mean nothing alone.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
    sources: dict[str, str] = {}  # key: the parameter it went into
    for file, key, read in iterate(folder):
        if ignored(key):
            continue
        name, shard = _rename(key, packed)
        if name not in parameters or shard not in todo[name]:
            leftover.append(f"{key} ({file.name})")
            continue
        _load_one(parameters[name], read(), shard, file, key)
        todo[name].discard(shard)
        sources[key] = name
    missing = sorted(
        _checkpoint_key(name, shard, packed) for name, shards in todo.items() for shard in shards
    )
    problems = []
    if missing:
        problems.append(f"keys missing from it: {some(missing)}")
    if leftover:
        problems.append(f"keys that the model does not have: {some(sorted(leftover))}")
    if problems:
        raise CheckpointError(f"{folder} does not fit {type(model).__name__}: " + "; ".join(problems))
    _check_finite(parameters, sources, folder)


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
        if tensor.dtype not in DTYPES:
            raise ValueError(f"its dtype is {tensor.dtype}, and quantized checkpoints are not supported")
        if loader is None:
            if parameter.shape != tensor.shape:
                raise ValueError(f"expected shape {tuple(parameter.shape)}")
            parameter.data.copy_(tensor)
        elif shard is None:
            loader(parameter, tensor)
        elif isinstance(shard, tuple):
            loader(parameter, tensor, key, *shard)
        else:
            loader(parameter, tensor, shard)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"{file}: {key} of shape {tuple(tensor.shape)} does not fit: {error}"
        ) from error


def _check_finite(parameters: Mapping[str, nn.Parameter], sources: Mapping[str, str], folder: Path) -> None:
    """Raise CheckpointError that names the tensors with NaN or infinity: bytes damaged in the middle of a file."""
    # One sum a parameter and one synchronization in all: 16 GB take 5 ms on an H200.
    names = list(parameters)
    sums = [parameters[n].sum(dtype=torch.float32) for n in names]
    finite = torch.stack(sums).isfinite().tolist() if sums else []
    wrong = {name for name, good in zip(names, finite, strict=True) if not good}
    if not wrong:
        return
    damaged, large = [], []
    for file, key, read in iterate(folder):
        if sources.get(key) in wrong:
            dtype = parameters[sources[key]].dtype
            tensor = read()
            if not tensor.isfinite().all():
                damaged.append(f"{key} ({file.name})")
            elif not tensor.to(dtype).isfinite().all():
                large.append(f"{key} ({file.name}; {dtype})")
            del tensor
    if damaged or not large:
        raise CheckpointError(f"{folder} is damaged: NaN or infinity in {some(damaged or sorted(wrong))}")
    raise CheckpointError(f"{folder}: values too large for the dtype in {some(large)}: use another dtype")


def dummy(model: nn.Module, seed: int, shapes: Mapping[str, torch.Size] | None = None) -> None:
    """Random weights: matrices N(0, 0.02), vectors (norms) 1, biases 0.

    They depend on seed, device and parameter name only: with the `shapes` that the parameters have on one rank, every
    rank of a group draws the whole parameter and keeps its shard, so that all group sizes run the same model.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
            continue
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
            continue
        shape = torch.Size((shapes or {}).get(name, parameter.shape))
        # The rows that pad a vocabulary are of no rank's size: they stay zero.
        vocabulary = getattr(model.get_submodule(name.rpartition(".")[0]), "org_vocab_size", shape[0])
        shape = torch.Size((min(vocabulary, shape[0]), *shape[1:]))
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        whole.normal_(0.0, 0.02, generator=generator)
        _load_one(parameter, whole, None, Path("dummy"), name)
