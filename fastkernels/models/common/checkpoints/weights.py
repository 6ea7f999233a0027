"""Load safetensors into a model's parameters, one tensor at a time.

ARCH of the model file maps checkpoint keys to parameters: q_proj, k_proj and v_proj become one qkv_proj, and a matrix
per expert becomes one stacked parameter. The parameter's `weight_loader` writes each part where it belongs.
"""

from __future__ import annotations

import hashlib
import logging
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fastkernels.models.common.checkpoints import quantized
from fastkernels.models.common.checkpoints.checkpoint import (
    CheckpointError,
    heads,
    iterate,
    keys,
    parts_of,
    resolve,
    some,
    weight_files,
)
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.overrides.embedding.vllm import VllmVocabParallelEmbedding

log = logging.getLogger("fastkernels")
__all__ = ["CheckpointError", "dummy", "fill", "load", "resolve", "weight_files"]
# Of random weights. With embeddings this large, a layer changes the hidden state of a token by little. With 0.02, the
# mean over the context is the larger part after a few layers, and the tokens of a prompt go to the same experts.
STD, EMBEDDING_STD = 0.02, 10.0
MX_SCALE = 120  # of MXFP4: 2^-7 times values of about 3
# Other dtypes belong to quantized weights, whose values need scales.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


Tensors: TypeAlias = Iterable[tuple[Path, str, Callable[[], torch.Tensor]]]


def load(model: nn.Module, folder: Path, arch: Architecture, config: Any) -> None:
    """Fill every parameter of the model from the checkpoint. Raises CheckpointError; see fill."""
    sources = fill(model, tensors_of(folder, arch, config), arch, config, folder)
    _check_finite(dict(model.named_parameters()), sources, folder, tensors_of(folder, arch, config))


def tensors_of(folder: Path, arch: Architecture, config: Any, device: str = "cpu") -> Tensors:
    """The tensors of the checkpoint, with those of the heads that config.heads names. Raises CheckpointError."""
    if arch.folders:
        return chain.from_iterable(_part(folder / part, f"{part}.", device) for part in arch.folders)
    if arch.files:
        return parts_of(folder, arch.files, device)
    own = {name: arch.heads[name] for name in getattr(config, "heads", ())}
    found: Tensors = iterate(folder, device)
    if arch.stacked:
        found = _unstacked(found, registry.load(arch.stacked), config)
    return chain(found, heads(folder, own, device))


def _unstacked(tensors: Tensors, parts: Callable[..., Iterable[Any]], config: Any) -> Tensors:
    """The tensors, and instead of those that `parts` knows (ARCH.stacked), their parts."""
    for file, key, read in tensors:
        made = list(parts(key, config))
        if not made:
            yield file, key, read
            continue
        whole = read() if made[0][1] is not None else None  # of which parts are views
        count = len(made)
        if whole is not None and (whole.dim() < 2 or len(whole) != count):
            raise CheckpointError(
                f"{file}: {key} of shape {tuple(whole.shape)} does not fit: it must have {count} layers first"
            )
        for name, index, turned in made:
            yield file, name, partial(_part_of, read if whole is None else whole, index, turned)


def _part_of(whole: Any, index: int | None, turned: bool) -> torch.Tensor:
    found: torch.Tensor = whole() if index is None else whole[index]
    return found.t() if turned and found.dim() == 2 else found


def _part(folder: Path, prefix: str, device: str) -> Tensors:
    """The tensors of a folder, whose keys get a prefix."""
    for file, key, read in iterate(folder, device):
        yield file, prefix + key, read


def untie(config: Any, folder: Path, arch: Architecture) -> None:
    """Set tie_word_embeddings to false if the checkpoint has another matrix for the head, as transformers 5 does.

    vLLM drops the head's matrix of such a checkpoint. Files that cannot be read pass; loading describes their problem.
    """
    if not arch.tied or not getattr(config, "tie_word_embeddings", False):
        return
    wanted, found = {name for pair in arch.tied.items() for name in pair}, {}
    try:
        if not wanted <= {arch.own_key(key) for key in keys(folder)}:
            return
        for _, key, read in iterate(folder):
            if (own := arch.own_key(key)) in wanted:
                found[own] = read()
        for head, embedding in arch.tied.items():
            one, other = found[head], found[embedding]
            if one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other):
                continue
            config.tie_word_embeddings = False
            log.warning(
                "%s: config.tie_word_embeddings is true, and the weights have another %s: it is used, as by"
                " transformers; set tie_word_embeddings to false to silence this warning", folder, head,
            )  # fmt: skip
    except CheckpointError:
        return


def fill(
    model: nn.Module,
    tensors: Tensors,
    arch: Architecture,
    config: Any,
    folder: Path,
) -> dict[str, str]:
    """Copy tensors into the model's parameters; returns {key: the parameter it went into}.

    tensors: (file, key, read) of each, see checkpoint.iterate. On the device 'meta' only names and shapes are checked.
    Raises CheckpointError that names the keys that are missing, unknown, or of another shape.
    """
    parameters = dict(model.named_parameters())
    packed = packed_parts(arch.packed)
    if arch.experts:
        packed.update(expert_parts(registry.load(arch.experts)(config)))
    tied = set(arch.tied) if getattr(config, "tie_word_embeddings", False) else set()
    shards: dict[str, set[Shard]] = {}
    for ours, part in packed.values():
        shards.setdefault(ours, set()).add(part)
    todo = {name: _parts_of(name, shards) for name in parameters}
    if arch.absent:
        _leave_out(parameters, todo, packed, registry.load(arch.absent)(config))
    unused = (*arch.unused, *_prediction_layers(config))
    if arch.unneeded:
        unused += tuple(registry.load(arch.unneeded)(config))
    leftover: list[str] = []
    sources: dict[str, str] = {}  # key: the parameter it went into
    reader = quantized.Reader(config, model)
    layers = {name.rpartition(".")[0] for name in parameters}
    for file, key, read in tensors:
        own = arch.own_key(key)
        if own in tied or any(fnmatchcase(own, pattern) for pattern in unused):
            continue
        # Gemma 4's layers with the keys of another one have a q_proj of their own.
        renamed, shard = (own, None) if own.rpartition(".")[0] in layers else _rename(own, packed)
        for name, convert in reader.targets(renamed):
            if name:
                # Without a shard, the checkpoint has the matrices packed, too: all parts.
                parts = {shard} if shard is not None else todo.get(name, set())
                if not parts or not parts <= todo.get(name, set()):
                    again = name in todo and any(fnmatchcase(own, pattern) for pattern in arch.repeated)
                    # Without shared experts, transformers writes empty matrices.
                    if not again and read().numel():
                        leftover.append(f"{key} ({file.name})")
                    continue
                todo[name] -= parts
                sources[key] = name
            _load_one(parameters.get(name), read, convert, shard, file, key)
    missing = sorted(
        arch.checkpoint_key(_unpacked(reader.checkpoint_name(name), shard, packed))
        for name, shards in todo.items()
        for shard in shards
    )
    problems = []
    for pattern, what in arch.needed.items():
        lacking = [key for key in missing if fnmatchcase(key, pattern)]
        if lacking:
            problems.append(f"it lacks {what}: {some(lacking)}")
            missing = [key for key in missing if key not in lacking]
    if missing:
        problems.append(f"keys missing from it: {some(missing)}")
    if leftover:
        problems.append(f"keys that the model does not have: {some(sorted(leftover))}")
    if problems:
        raise CheckpointError(f"{folder} does not fit {type(model).__name__}: " + "; ".join(problems))
    return sources


def count_of_heads(config: Any) -> int | None:
    """config.num_nextn_predict_layers; None if it is not there. Raises CheckpointError for anything but a count."""
    count = getattr(config, "num_nextn_predict_layers", None)
    if count is not None and (type(count) is not int or count < 0):
        raise CheckpointError(
            f"config.num_nextn_predict_layers must be an integer of at least 0, got {reprlib.repr(count)}"
        )
    return count


def _prediction_layers(config: Any) -> list[str]:
    """Patterns of the keys of layers for multi-token prediction, which follow the decoder's layers."""
    first, count = getattr(config, "num_hidden_layers", 0), count_of_heads(config) or 0
    return [f"model.layers.{first + i}.*" for i in range(count)]


# How a weight_loader names a part: (shard_id, expert_id) for stacked experts; None: the whole parameter.
Shard: TypeAlias = "str | int | tuple[str, int] | None"


def packed_parts(mapping: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, Shard]]:
    """{their module name: (our module name, shard id)}. Shard ids are vLLM's: 'q', 'k', 'v', or 0, 1, ..."""
    parts: dict[str, tuple[str, Shard]] = {}
    for ours, theirs in mapping.items():
        lettered = ours == "qkv_proj" or tuple(theirs) == ("q", "k", "v")
        for i, part in enumerate(theirs):
            parts[part] = (ours, part[0] if lettered else i)
    return parts


def expert_parts(mapping: Iterable[tuple[str, str, int, str]]) -> dict[str, tuple[str, Shard]]:
    """The same for vLLM's expert mapping: {'experts.3.w1': ('experts.w13_', ('w1', 3))}, before a parameter's name."""
    return {theirs.removesuffix("."): (ours, (shard, expert)) for ours, theirs, expert, shard in mapping}


def _has(name: str, module: str) -> bool:
    """Whether the parameter `name` belongs to one of our modules, or to the experts' matrix 'experts.w13_'."""
    return (f".{module}" if module.endswith("_") else f".{module}.") in f".{name}"


def _rename(key: str, packed: Mapping[str, tuple[str, Shard]]) -> tuple[str, Shard]:
    pieces = key.split(".")
    for i in range(len(pieces)):
        for n in (1, 3):  # a module, or a matrix of an expert: experts.N.w1
            found = packed.get(".".join(pieces[i : i + n]))
            if found is not None and i + n < len(pieces):
                above, rest = "".join(f"{piece}." for piece in pieces[:i]), ".".join(pieces[i + n :])
                return f"{above}{found[0]}{'' if found[0].endswith('_') else '.'}{rest}", found[1]
    return key, None


def _parts_of(name: str, shards: Mapping[str, set[Shard]]) -> set[Shard]:
    return {shard for ours, found in shards.items() if _has(name, ours) for shard in found} or {None}


def _leave_out(
    parameters: Mapping[str, nn.Parameter], todo: Mapping[str, set[Shard]],
    packed: Mapping[str, tuple[str, Shard]], patterns: Sequence[str],
) -> None:  # fmt: skip
    """Drop the parts whose keys match from `todo`, and set their parameters to zero."""
    for name, shards in todo.items():
        keys = {shard: _unpacked(name, shard, packed) for shard in shards}
        left_out = {s for s, key in keys.items() if any(fnmatchcase(key, p) for p in patterns)}
        if left_out:
            parameters[name].data.zero_()
            shards -= left_out


def _unpacked(name: str, shard: Shard, packed: Mapping[str, tuple[str, Shard]]) -> str:
    for theirs, (ours, part) in packed.items():
        if part == shard and _has(name, ours):
            dot = "" if ours.endswith("_") else "."
            return f".{name}".replace(f".{ours}{dot}", f".{theirs}.")[1:]
    return name


def _load_one(
    parameter: nn.Parameter | None, read: Callable[[], torch.Tensor], convert: quantized.Convert, shard: Shard,
    file: Path, key: str,
) -> None:  # fmt: skip
    loader: Any = getattr(parameter, "weight_loader", None)
    tensor = read()
    try:
        converted = convert(tensor)
        if parameter is None:
            return  # the conversion was a check
        _check_dtype(parameter, converted, key)
        _copy(parameter, loader, converted, shard, key)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        raise CheckpointError(
            f"{file}: {key} of shape {tuple(tensor.shape)} does not fit: {error}"
        ) from error


def _check_dtype(parameter: nn.Parameter, tensor: torch.Tensor, key: str) -> None:
    if tensor.is_meta:
        return  # names and shapes are reported first
    if parameter.dtype in DTYPES and tensor.dtype not in DTYPES:
        unknown = ": a quantized weight, which config.quantization_config does not name"
        scale = "scale" in key.rpartition(".")[2]
        raise ValueError(f"its dtype is {tensor.dtype}{f', not {parameter.dtype}' if scale else unknown}")
    if parameter.dtype not in DTYPES and tensor.dtype != parameter.dtype:
        raise ValueError(
            f"its dtype is {tensor.dtype}, not {parameter.dtype} as config.quantization_config has it"
        )


def _copy(parameter: nn.Parameter, loader: Any, tensor: torch.Tensor, shard: Shard, key: str) -> None:
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


def _check_finite(
    parameters: Mapping[str, nn.Parameter], sources: Mapping[str, str], folder: Path, tensors: Tensors
) -> None:
    """Raise CheckpointError that names the tensors with NaN or infinity, e.g. from a damaged file."""
    # One sum per parameter and a single synchronization: 16 GB take 5 ms on an H200.
    names = list(parameters)
    sums = [_sum(parameters[n].data) for n in names]
    finite = torch.stack(sums).isfinite().tolist() if sums else []
    wrong = {name for name, good in zip(names, finite, strict=True) if not good}
    if not wrong:
        return
    damaged, large = [], []
    for file, key, read in tensors:
        if sources.get(key) in wrong:
            dtype = parameters[sources[key]].dtype
            tensor = read()
            if not tensor.float().isfinite().all():
                damaged.append(f"{key} ({file.name})")
            elif not tensor.to(dtype).float().isfinite().all():
                large.append(f"{key} ({file.name}; {dtype})")
            del tensor
    if damaged or not large:
        raise CheckpointError(f"{folder} is damaged: NaN or infinity in {some(damaged or sorted(wrong))}")
    raise CheckpointError(f"{folder}: values too large for the dtype in {some(large)}: use another dtype")


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """A value that is not finite if one in the tensor is not. Float8 has no infinity, and no sum."""
    if tensor.dtype == torch.float8_e4m3fn:
        damaged = (tensor.view(torch.uint8) & 0x7F).eq(0x7F).any()
        return torch.where(damaged, torch.nan, 0.0)
    return tensor.sum(dtype=torch.float32)


def random_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """The generator of the random weights of one parameter."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def dummy(model: nn.Module, seed: int, shapes: Mapping[str, torch.Size] | None = None) -> None:
    """Random weights: matrices N(0, 0.02), embeddings N(0, 10) after their scale, vectors (norms) 1, biases 0.

    They depend on seed, device and parameter name only. With `shapes`, the unsharded shapes, every rank draws the
    whole parameter and keeps its shard, so that the model is the same for every number of ranks.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
            continue
        if name.endswith("_scale"):  # of quantized weights
            parameter.data.fill_(0.02)
            continue
        if name.endswith(".g_idx"):
            groups: int = model.get_parameter(f"{name.removesuffix('g_idx')}weight_scale").shape[1]
            parameter.data.copy_(torch.arange(len(parameter)) * groups // len(parameter))
            continue
        if parameter.dim() < 2:
            parameter.data.fill_(getattr(parameter, "fill", 1.0))
            continue
        if parameter.dtype == torch.uint8 and name.endswith("_scales"):
            parameter.data.fill_(MX_SCALE)
            continue
        shape = torch.Size((shapes or {}).get(name, parameter.shape))
        owner = model.get_submodule(name.rpartition(".")[0])
        # Rows that pad the vocabulary stay zero: their number depends on the number of ranks.
        vocabulary = getattr(owner, "org_vocab_size", shape[0])
        shape = torch.Size((min(vocabulary, shape[0]), *shape[1:]))
        generator = random_generator(seed, name, parameter.device)
        whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        if parameter.dtype == torch.uint8:
            whole.random_(0, 256, generator=generator)
        elif parameter.dtype not in DTYPES:
            for part in whole if whole.dim() > 2 else [whole]:  # an expert at a time needs less memory
                part.copy_(torch.empty_like(part, dtype=torch.float32).normal_(0.0, 1.0, generator=generator))
        else:
            embedding = isinstance(owner, VllmVocabParallelEmbedding)
            std = EMBEDDING_STD / getattr(owner, "scale", 1.0) if embedding else STD
            whole.normal_(0.0, std, generator=generator)
        if getattr(parameter, "turned", False):  # checkpoints have it transposed
            whole = whole.transpose(1, 2)
        _copy(parameter, getattr(parameter, "weight_loader", None), whole, None, name)
