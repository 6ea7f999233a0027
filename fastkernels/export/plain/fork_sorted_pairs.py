"""The order of pairs that kernels of experts read, in one function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton import cdiv, next_power_of_2

from fastkernels.overrides.kit.overlap import launch_kernel
from fastkernels.overrides.moe.moe_align_triton import count_kernel, expert_kernel, place_kernel


class Sorted(NamedTuple):
    """See sorted_pairs.py."""

    pairs: torch.Tensor | None
    experts: torch.Tensor
    total: torch.Tensor | None
    n_pairs: int
    topk: int
    blocks: int


def sort_pairs(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None, block_m: int) -> Sorted:
    count, topk = ids.numel(), ids.shape[1]
    if expert_map is None and 4 * count <= experts:  # most experts have at most one: block i is pair i
        return Sorted(None, ids, None, count, topk, count)
    blocks = min(count, cdiv(count + experts * (block_m - 1), block_m))
    sizes, bins = (count, experts, blocks * block_m, blocks), max(next_power_of_2(experts), 32)
    outs = [torch.empty(n, dtype=torch.int32, device=ids.device) for n in (blocks * block_m, blocks, 1)]
    flags = {"HAS_MAP": expert_map is not None, "INVALID_FIRST": False, "BINS": bins}
    if count * (experts + 32) < 1 << 16:
        chunk = min(max(next_power_of_2(count), 128), 4096)
        launch_kernel(
            expert_kernel, (experts,), ids, expert_map, *outs, *sizes, block_m, **flags, CHUNK=chunk,
            FILL=min(chunk, 256), num_warps=4 if chunk <= 1024 else 8,
        )  # fmt: skip
    else:  # two launches are faster (H200)
        chunk = max(next_power_of_2(cdiv(count, min(max(32768 // bins, 16), 128))), 64)
        grid = (cdiv(count, chunk),)
        given = (ids, expert_map, torch.empty((*grid, bins), dtype=torch.int32, device=ids.device))
        launch_kernel(
            count_kernel, grid, *given, *outs[:2], *sizes, **flags, CHUNK=chunk, PIECE=min(chunk, 512), FILL=256,
            num_warps=min(chunk // 32, 4),
        )  # fmt: skip
        rows = min(next_power_of_2(grid[0]), max(4096 // bins, 1))
        launch_kernel(
            place_kernel, grid, *given, *outs, *sizes, block_m, **flags, CHUNK=chunk, PIECE=min(chunk, 128), ROWS=rows,
            num_warps=4,
        )  # fmt: skip
    return Sorted(outs[0], outs[1], outs[2], count, topk, blocks)
