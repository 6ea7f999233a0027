"""Second copies of weights on the CPU, in the layout that makes decode steps fast."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch

from fastkernels.overrides.embedding.vocab_parallel import Head
from fastkernels.overrides.kit import cpu
from fastkernels.overrides.linear.linear import PACKED_TYPES, pack_weight
from fastkernels.overrides.linear.parallel_linear import ParallelLinear

log = logging.getLogger("fastkernels")
SHARE = 4  # the copies take at most one part of so many of the machine's memory


def pack_weights(model: Any) -> None:
    """Pack the weights of a model's linear layers and head, unless the copies would take too much memory.

    A type that this CPU cannot pack is logged once: its layers read the weights as they are.
    """
    modules = [m for m in model.modules() if isinstance(m, (ParallelLinear, Head))]
    weights = [getattr(m, "weight", None) for m in [*modules, getattr(model, "lm_head", None)]]
    found = {id(w): w for w in weights if isinstance(w, torch.Tensor) and w.dim() == 2 and _packable(w.dtype)}
    size = sum(weight.numel() * weight.element_size() for weight in found.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size * SHARE > memory:
        log.info("weights are not packed for decoding: %.1f of %.1f GB", size / 1e9, memory / 1e9)
        return
    for weight in found.values():
        pack_weight(weight)


@cache
def _packable(dtype: torch.dtype) -> bool:
    reason = cpu.packing_unsupported(dtype) if dtype in PACKED_TYPES else ""
    if reason:
        log.info("weights in %s are not packed for decoding: %s", str(dtype).removeprefix("torch."), reason)
    return reason is None
