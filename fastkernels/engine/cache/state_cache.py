"""Slots of recurrent state on one rank: allocation, copies, and how many fit into a memory.

Slot 0 is for padding, slots 1 .. max_num_seqs are those of running sequences. Then come snapshots, and with speculative
decoding a copy of each running sequence's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from fastkernels.core.layer_state import StateSpec, zero_states
from fastkernels.engine.cache.kv_cache import GIB
from fastkernels.engine.options.config import STATE_DTYPES, EngineConfig

IN_MODEL_DTYPE = {"mamba_scan", "ssd", "gated_delta_rule"}  # ops whose states vLLM keeps in the model's dtype
SHARE = 8  # snapshots get at most this part of the memory of blocks
EACH = 2  # snapshots for each sequence, at most


def state_layers(modules: Sequence[Any]) -> list[Any]:
    """The modules that keep a state."""
    return [m for m in modules if isinstance(getattr(m, "keeps", None), StateSpec)]


def set_dtypes(layers: Sequence[Any], wanted: str, hf_config: Any, dtype: torch.dtype) -> None:
    """Give recurrent states the dtype of EngineConfig.mamba_ssm_cache_dtype, for a model in `dtype`.

    Raises ValueError for a dtype of the checkpoint's config that states cannot have.
    """
    if wanted == "auto":
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        named = (getattr(text, name, None) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
        wanted = next((str(n).removeprefix("torch.") for n in named if n is not None), "auto")
    if wanted not in STATE_DTYPES:
        raise ValueError(
            f"the checkpoint's config has recurrent states in {wanted!r}, which is not one of"
            f" {', '.join(STATE_DTYPES[1:])}: choose one with mamba_ssm_cache_dtype"
        )
    for layer in layers:
        keeps = layer.keeps
        if "recurrent" not in keeps.tensors:
            continue
        own = dtype if IN_MODEL_DTYPE & {*layer.ops} else torch.float32
        shape, _ = keeps.tensors["recurrent"]
        state = shape, own if wanted == "auto" else getattr(torch, wanted)
        layer.keeps = replace(keeps, tensors={**keeps.tensors, "recurrent": state})


def state_bytes(layers: Sequence[Any], dtype: torch.dtype) -> int:
    """Bytes of one slot in all layers."""
    tensors = [t for layer in layers for t in layer.keeps.tensors.values()]
    return sum(prod(shape) * (own or dtype).itemsize for shape, own in tensors)


def num_snapshots(config: EngineConfig, slot_bytes: int, num_bytes: int) -> int:
    """The number of snapshots that num_bytes may hold."""
    if not config.enable_prefix_caching:
        return 0
    if config.num_snapshots is not None:
        return config.num_snapshots
    return max(0, min(EACH * config.max_num_seqs, num_bytes // slot_bytes))


def check_room(config: EngineConfig, slot_bytes: int, num_bytes: int) -> None:
    """Raise ValueError if num_bytes cannot hold a slot for each of max_num_seqs sequences."""
    fitting = num_bytes // slot_bytes - 1
    if fitting >= config.max_num_seqs:
        return
    mib = float(1 << 20)
    advice = (
        f"reduce max_num_seqs to at most {fitting}" if fitting > 0 else "use a larger tensor_parallel_size"
    )
    raise ValueError(
        f"max_num_seqs {config.max_num_seqs} does not fit: a sequence has a recurrent state of {slot_bytes / mib:.2f}"
        f" MiB, padding has one more, and the {max(0, num_bytes) / GIB:.2f} GiB for them hold {max(0, fitting)}"
        f" sequences; {advice}, or increase kv_cache_memory or gpu_memory_utilization"
    )


class StateCache:
    """The states of all layers. Tensors of the same shape and dtype are one, so that a copy is one launch for each.

    A layer's method `begin`, if it has one, writes to slot 0 what its sequences begin with.
    """

    def __init__(self, layers: Sequence[Any], slots: int, dtype: torch.dtype, device: torch.device):
        self.slots = slots
        places: dict[tuple[tuple[int, ...], torch.dtype, bool], list[tuple[Any, str]]] = {}
        for layer in layers:
            layer.states = {}
            for name, (shape, own) in layer.keeps.tensors.items():
                key = tuple(shape), own or dtype, name in layer.keeps.swapped
                places.setdefault(key, []).append((layer, name))
        self._tensors = []
        for (shape, kind, swapped), users in places.items():
            whole = zero_states((len(users), slots, *shape), kind, device, swapped)
            self._tensors.append(whole)
            for (layer, name), part in zip(users, whole, strict=True):
                layer.states[name] = part
        for layer in layers:
            if hasattr(layer, "begin"):
                layer.begin()

    def copy(self, pairs: np.ndarray) -> None:
        """Copy slots: pairs [N, 2] of (from, to), in this order."""
        for source, target in pairs.tolist():
            for tensor in self._tensors:
                tensor[:, target].copy_(tensor[:, source])
