"""(token, expert) pairs in the order of their experts, as the grouped matrix products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.routing.moe_align import moe_align, padded_size


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


@triton.jit(do_not_specialize=["n_pairs", "s_block", "to_block"])
def _gather_kernel(
    x_ptr, s_ptr, pairs_ptr, total_ptr, out_ptr, so_ptr, n_pairs, s_row, s_block, to_row, to_block,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(total_ptr):
        return
    pair = tl.load(pairs_ptr + row)
    if pair >= n_pairs:
        return
    token = (pair // TOPK).to(tl.int64)
    for first in range(0, WORDS, BLOCK):
        at = first + tl.arange(0, BLOCK)
        words = tl.load(x_ptr + token * WORDS + at, mask=at < WORDS, other=0)
        tl.store(out_ptr + row * WORDS + at, words, mask=at < WORDS)
    for first in range(0, GROUPS, 128):
        group = first + tl.arange(0, 128)
        scales = tl.load(s_ptr + token * s_row + group * s_block, mask=group < GROUPS, other=0.0)
        tl.store(so_ptr + row * to_row + group.to(tl.int64) * to_block, scales, mask=group < GROUPS)


def gather(x: torch.Tensor, scale: torch.Tensor, pairs: Sorted) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of float8 x [T, K] and their scales [T, K / 128] in the order of sorted pairs, scales by column.

    Rows of padding are not written.
    """
    assert pairs.pairs is not None and x.is_contiguous() and x.shape[1] % 4 == 0
    rows, words, groups = pairs.pairs.numel(), x.shape[1] // 4, scale.shape[1]
    out = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device).t()
    launch_kernel(
        _gather_kernel, (rows,), x.view(torch.int32), scale, pairs.pairs, pairs.total, out.view(torch.int32), scales,
        pairs.n_pairs, *scale.stride(), *scales.stride(), WORDS=words, GROUPS=groups, TOPK=pairs.topk,
        BLOCK=min(next_power_of_2(words), 2048), num_warps=4,
    )  # fmt: skip
    return out, scales


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
