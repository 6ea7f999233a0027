"""The paged KV cache: dtype, number of blocks, and binding to the attention layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.engine.config import EngineConfig

log = logging.getLogger("fastkernels")
CPU_CACHE = 1 << 30  # default bytes of KV cache on the CPU
GIB = float(1 << 30)


@dataclass(frozen=True)
class Limits:
    """Limits of the machine and the model, derived when the engine is built."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The torch dtype for EngineConfig.kv_cache_dtype and a model of `dtype`."""
    return {"auto": dtype, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]


def block_bytes(layers: Sequence[Any], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers."""
    return sum(2 * block_size * m.num_kv_heads * m.head_size * dtype.itemsize for m in layers)


def bind(
    layers: Sequence[Any], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give every layer a cache of `num_blocks` blocks, after freeing its old one.

    Raises ValueError for too little memory.
    """
    unbind(layers)
    try:
        for layer in layers:
            shape = (2, num_blocks, block_size, layer.num_kv_heads, layer.head_size)
            cache = torch.zeros(shape, dtype=dtype, device=device)
            layer.kv_cache = (cache[0], cache[1])
    except RuntimeError as error:  # includes torch.cuda.OutOfMemoryError
        unbind(layers)
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        size = num_blocks * block_bytes(layers, block_size, dtype) / GIB
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ValueError(
            f"the KV cache of {num_blocks} blocks needs {size:.2f} GiB, more than {where} has free;"
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
    """max_model_len, or the model's own limit. Raises ValueError for a length over that limit."""
    own = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len or 2048
    if config.max_model_len is not None and config.max_model_len > own:
        raise ValueError(f"max_model_len {config.max_model_len} is more than the model's {own}")
    return config.max_model_len or own


def limits(config: EngineConfig, wanted: int, num_blocks: int) -> Limits:
    """Limits for `num_blocks` blocks, block 0 included. Raises ValueError if config.max_model_len does not fit."""
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
    log.info("KV cache: %d blocks of %d tokens", num_blocks, config.block_size)
    return Limits(num_blocks, min(wanted, room), config.max_num_batched_tokens)


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
