"""Experts of data-parallel ranks: each rank has its own tokens and a part of every mixture's experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from fastkernels.core import parallel
from fastkernels.core.forward_context import most_tokens
from fastkernels.models.common.layers.clamped_experts import StackedExperts
from fastkernels.overrides.expert_parallel.ep_combine import ep_combine
from fastkernels.overrides.expert_parallel.ep_dispatch import ep_dispatch
from fastkernels.overrides.moe.sparse_moe import Experts

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def connect(model: nn.Module) -> bool:
    """Let the experts of a model that was built as a data-parallel rank compute the tokens of all ranks.

    Returns whether it has any.
    """
    data_rank, size = parallel.get_data_rank()
    found = [m for m in model.modules() if isinstance(m, (Experts, StackedExperts))]
    for module in found:
        first, count = module.first - data_rank * module.count, size * module.count
        module.over_ranks = partial(over_ranks, first, count)
    return bool(found)


def over_ranks(
    first: int, count: int, compute: Compute, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """compute(x, weights, ids) with the `count` experts from `first` on that data-parallel ranks divide.

    x: [T, H]; weights, ids: [T, K] with numbers among all experts; others than these are left out. `compute` gets the
    tokens of all ranks that one of this rank's experts computes, with numbers among these, and -1 for no expert. All
    ranks must come here, in the same order of layers. Ranks with fewer tokens than the largest one pass padding.
    """
    tokens = x.shape[0]
    more = most_tokens(tokens) - tokens
    ids, weights = ids.to(torch.int32), weights.to(torch.float32)
    ids = ids - first if first else ids
    if more:
        x, weights = (functional.pad(t, (0, 0, 0, more)) for t in (x, weights))
        ids = functional.pad(ids, (0, 0, 0, more), value=-1)
    rows, own_ids, own_weights, source = ep_dispatch(x, ids, weights, count, parallel.EP)
    return ep_combine(compute(rows, own_weights, own_ids), source, parallel.EP)[:tokens]
