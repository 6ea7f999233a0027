"""The paged KV cache: dtype, number of blocks, and binding to the attention layers."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.engine.options.config import EngineConfig
from fastkernels.models.common.configs import length

log = logging.getLogger("fastkernels")
CPU_CACHE = 1 << 30  # default bytes of KV cache on the CPU
GIB = float(1 << 30)


@dataclass(frozen=True)
class Limits:
    """Limits of the machine and the model, derived when the engine is built.

    groups: (window, number of blocks) of each group of layers; see Group.
    snapshots: of recurrent states; None: no layer keeps a state.
    media: features of media that the ranks keep.
    cross: (blocks of sources, states of a source); None: the model has no cross attention.
    border: of tokens that no step crosses, a multiple of so many; 0: there is none.
    """

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    groups: tuple[tuple[int | None, int], ...] = ()
    snapshots: int | None = None
    media: int = 0
    cross: tuple[int, int] | None = None
    border: int = 0


@dataclass(frozen=True)
class Group:
    """Attention layers that share block tables. window: tokens that a query sees, itself included; None: all."""

    window: int | None
    layers: tuple[Any, ...]


def groups_of(layers: Sequence[Any], max_model_len: int) -> list[Group]:
    """The layers by window, the largest first. A window as long as the context is none."""
    found: dict[int | None, list[Any]] = {}
    for layer in layers:
        window = layer.keeps.window
        found.setdefault(window if window and window < max_model_len else None, []).append(layer)
    order = sorted(found, key=lambda window: -(window or max_model_len))
    return [Group(window, tuple(found[window])) for window in order]


def group_blocks(groups: Sequence[Group], num_blocks: int, config: EngineConfig) -> list[int]:
    """The number of blocks of each group: num_blocks, or fewer where windows need no more, however long the context.

    A running sequence holds the blocks that its window touches and at most three more; a step adds those of its tokens.
    """
    size, made = config.block_size, [num_blocks][: len(groups)]
    for group in groups[1:]:
        assert group.window is not None
        each = -(-(group.window - 1) // size) + 3
        most = 1 + config.max_num_seqs * each + -(-config.max_num_batched_tokens // size)
        made.append(min(num_blocks, most))
    return made


def fitting_blocks(groups: Sequence[Group], num_bytes: int, config: EngineConfig, dtype: torch.dtype) -> int:
    """The largest number of blocks of the first group with which the caches of all groups fit into num_bytes."""
    if not groups:
        return 0
    each = [block_bytes(group.layers, config.block_size, dtype) for group in groups]

    def total(num_blocks: int) -> int:
        counts = group_blocks(groups, num_blocks, config)
        return sum(n * size for n, size in zip(counts, each, strict=True))

    return bisect.bisect_right(range(1, num_bytes // each[0] + 1), num_bytes, key=total)


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The torch dtype for EngineConfig.kv_cache_dtype and a model of `dtype`."""
    return {"auto": dtype, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]


def block_bytes(layers: Sequence[Any], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: what these layers cache."""
    return sum(t.nbytes for m in layers for t in m.new_cache(1, block_size, dtype, "meta"))


def bind(
    groups: Sequence[Group], counts: Sequence[int], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give every layer a cache of its group's number of blocks, after freeing its old one.

    Raises ValueError for too little memory.
    """
    layers = [layer for group in groups for layer in group.layers]
    unbind(layers)
    try:
        for i, (group, num_blocks) in enumerate(zip(groups, counts, strict=True)):
            for layer in group.layers:
                layer.kv_cache, layer.kv_group = layer.new_cache(num_blocks, block_size, dtype, device), i
    except RuntimeError as error:  # includes torch.cuda.OutOfMemoryError
        unbind(layers)
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sizes = (n * block_bytes(g.layers, block_size, dtype) for g, n in zip(groups, counts, strict=True))
        size = sum(sizes) / GIB
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ValueError(
            f"the KV cache of {counts[0]} blocks needs {size:.2f} GiB, more than {where} has free;"
            " reduce num_blocks or kv_cache_memory, or leave them out"
        ) from error


def unbind(layers: Sequence[Any]) -> None:
    for layer in layers:
        layer.kv_cache = None


def cuda_budget(config: EngineConfig) -> int:
    """Bytes on the current GPU for this process's weights, activations and cache."""
    free, total = torch.cuda.mem_get_info()
    used_by_others = total - free - torch.cuda.memory_reserved()
    return int(total * config.gpu_memory_utilization) - used_by_others


def wanted_model_len(config: EngineConfig, hf_config: Any) -> int:
    """max_model_len, or the model's default. Raises ValueError for more positions than the model has."""
    wanted = config.max_model_len
    if wanted is None:
        return length.default(hf_config)
    own = length.longest(hf_config)
    if own and wanted > own and length.has_positions(hf_config):
        raise ValueError(f"max_model_len {wanted} is more than the model's {own}")
    return wanted


def limits(config: EngineConfig, wanted: int, num_blocks: int, groups: Sequence[Group]) -> Limits:
    """Limits for `num_blocks` blocks of the first group, block 0 included.

    Raises ValueError if config.max_model_len does not fit.
    """
    if not groups:
        return Limits(0, wanted, config.max_num_batched_tokens)
    room = (num_blocks - 1) * config.block_size
    if room < (config.max_model_len or config.block_size):
        what = (
            f"max_model_len {config.max_model_len}" if config.max_model_len else "one block of one sequence"
        )
        raise ValueError(
            f"{what} does not fit: the KV cache has {max(num_blocks, 0)} blocks, one of them for padding, and"
            f" holds {max(room, 0)} tokens; reduce max_model_len, or increase num_blocks or kv_cache_memory"
        )
    if room < wanted:
        log.warning("max_model_len is %d, not the model's %d: the KV cache holds no more", room, wanted)
    counts = group_blocks(groups, num_blocks, config)
    log.info("KV cache: %s blocks of %d tokens", " and ".join(map(str, counts)), config.block_size)
    windows = tuple((group.window, n) for group, n in zip(groups, counts, strict=True))
    return Limits(num_blocks, min(wanted, room), config.max_num_batched_tokens, windows)


def too_large(
    weights: int, activations: int, sequence: int, length: int, budget: int, config: EngineConfig
) -> ValueError:
    """The error for a model that does not fit. Sizes in bytes; `sequence`: the cache of `length` tokens."""
    need = weights + activations + sequence
    return ValueError(
        f"the model does not fit: weights {weights / GIB:.2f} GiB, activations {activations / GIB:.2f} GiB (a step of"
        f" {config.max_num_batched_tokens} tokens, {config.max_num_seqs} sequences) and the KV cache of one sequence"
        f" of {length} tokens {sequence / GIB:.2f} GiB need {need / GIB:.2f} GiB of {budget / GIB:.2f} GiB"
        f" (gpu_memory_utilization {config.gpu_memory_utilization:g}); reduce max_model_len, max_num_batched_tokens or"
        " max_num_seqs, use kv_cache_dtype='fp8' or a larger tensor_parallel_size, or increase"
        " gpu_memory_utilization if no other process uses the GPU"
    )
