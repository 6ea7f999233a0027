"""Second copies of weights on the CPU, in the layout that makes decode steps fast."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from fastkernels.overrides.embedding.vocab_parallel import Head
from fastkernels.overrides.linear.linear import pack_weight
from fastkernels.overrides.linear.parallel_linear import ParallelLinear

log = logging.getLogger("fastkernels")
SHARE = 4  # the copies take at most one part of so many of the machine's memory


def pack_weights(model: Any) -> None:
    """Pack the weights of a model's linear layers and head, unless the copies would take too much memory."""
    if not torch.backends.mkldnn.is_available():
        return
    modules = [m for m in model.modules() if isinstance(m, (ParallelLinear, Head))]
    weights = [getattr(m, "weight", None) for m in [*modules, getattr(model, "lm_head", None)]]
    found = {id(w): w for w in weights if isinstance(w, torch.Tensor) and w.dim() == 2}
    size = sum(weight.numel() * weight.element_size() for weight in found.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size * SHARE > memory:
        log.info("weights are not packed for decoding: %.1f of %.1f GB", size / 1e9, memory / 1e9)
        return
    for weight in found.values():
        pack_weight(weight)
