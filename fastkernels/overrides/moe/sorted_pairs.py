"""(token, expert) pairs in the order of their experts, as the grouped matrix products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastkernels.overrides.moe.moe_align import moe_align, padded_size


class Sorted(NamedTuple):
    """(token, expert) pairs sorted by expert, in blocks of block_m; `sort_pairs` makes them.

    pairs    int32 indices of pairs, `n_pairs` for padding; None: block i holds pair i alone
    experts  the expert of each block
    total    int32 [1], the used entries of `pairs`; None: all
    n_pairs  number of pairs
    topk     pairs per token
    blocks   upper bound of the number of blocks
    """

    pairs: torch.Tensor | None
    experts: torch.Tensor
    total: torch.Tensor | None
    n_pairs: int
    topk: int
    blocks: int


def sorts(count: int, experts: int, expert_map: torch.Tensor | None) -> bool:
    """Return whether `sort_pairs` sorts so many pairs."""
    return expert_map is not None or 4 * count > experts or bool(moe_align.requested)


def sort_pairs(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, block_m: int) -> Sorted:
    """ids: [T, K], contiguous. All sizes depend on shapes alone: the CPU never waits for the GPU, and a captured CUDA
    graph is valid for any routing.

    With so few pairs that most experts have at most one, pairs are not sorted, as in vLLM, unless moe_align is
    explicitly requested.
    """
    count, topk = ids.numel(), ids.shape[1]
    if not sorts(count, experts, expert_map):
        return Sorted(None, ids, None, count, topk, count)
    capacity = -(-padded_size(count, block_m, experts) // block_m) * block_m
    pairs, of_blocks, total = moe_align.run(ids, block_m, experts, capacity, expert_map, False)
    return Sorted(pairs, of_blocks, total, count, topk, of_blocks.numel())
