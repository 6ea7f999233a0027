"""The Triton kernels of `fused_experts`: each expert's matrix times its own rows, and a sum over a token's experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from fastkernels.overrides.l1._launch import cdiv, next_power_of_2
from fastkernels.overrides.l1._overlap import follow, launch_kernel


@dataclass(frozen=True)
class Tiles:
    """Sizes of one program's part of the product. block_m is also the block_size of moe_align."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def tiles(rows: int, dtype: torch.dtype, wide: bool) -> Tiles:
    """The sizes for so many rows an expert on average; wide: there is shared memory for Hopper's largest.

    A block is larger than the average, for most experts of a router have more rows or fewer, and one of two blocks
    reads its weights twice: blocks of 32 took 1.29 to 1.36 times as long as those of 64 for 32 rows of Mixtral-8x7B.
    """
    block_m = 16 if rows <= 16 else 64 if rows <= 128 else 128
    if dtype == torch.float32:  # twice the shared memory, and no tensor cores to feed
        return Tiles(min(block_m, 64), 64, 32, 8, 4, 3)
    if (
        block_m == 16
    ):  # the weights are read once and that is all the time: many small programs, deep pipelines
        return Tiles(16, 64, 128, 1, 4, 4)
    if block_m == 64:
        return Tiles(64, 128, 64, 8, 4, 3)
    return Tiles(128, 256, 64, 8, 8, 3) if wide else Tiles(128, 128, 64, 8, 8, 3)


@lru_cache
def wide(device: torch.device) -> bool:
    """Whether the device has the shared memory of Hopper and later (3 stages of 128 x 256 x 64 are 144 KiB)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


@triton.jit
def _grouped_gemm_kernel(
    a_ptr, b_ptr, c_ptr, scale_ptr, sorted_ptr, experts_ptr, total_ptr, N, n_pairs, n_blocks, a_stride,
    b_expert, b_stride,
    K: tl.constexpr, TOPK: tl.constexpr, HAS_SCALE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # GROUP_M blocks of rows are neighbours, column by column: what they share of an expert's matrix comes from L2.
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * columns) * GROUP_M
    height = min(n_blocks - first, GROUP_M)
    block = first + pid % (GROUP_M * columns) % height
    col = pid % (GROUP_M * columns) // height
    if block * BLOCK_M >= tl.load(total_ptr):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(sorted_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    there = pairs < n_pairs
    rows = (tl.where(there, pairs, 0) // TOPK).to(tl.int64)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows[:, None] * a_stride + ks[None, :]
    b_at = b_ptr + expert * b_expert + cols.to(tl.int64)[None, :] * b_stride + ks[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at + k, mask=there[:, None], other=0.0)
            b = tl.load(b_at + k, mask=(cols < N)[None, :], other=0.0)
        else:
            a = tl.load(a_at + k, mask=there[:, None] & (ks < K - k)[None, :], other=0.0)
            b = tl.load(b_at + k, mask=(cols < N)[None, :] & (ks < K - k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if HAS_SCALE:
        acc *= tl.load(scale_ptr + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    to = c_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=there[:, None] & (cols < N)[None, :])


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    aligned: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pairs: int,
    topk: int,
    scale: torch.Tensor | None,
    t: Tiles,
) -> torch.Tensor:
    """a: [pairs / topk, K]; b: [E, N, K]; aligned: moe_align's results; scale: [pairs] or None.

    Returns [pairs, N]: row i is scale[i] * b[expert of pair i] @ a[i / topk]; rows of no expert are not written.
    """
    sorted_ids, expert_ids, total = aligned
    n, k = b.shape[1:]
    blocks = expert_ids.numel()
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    _grouped_gemm_kernel[(blocks * cdiv(n, t.block_n),)](
        a, b, out, scale, sorted_ids, expert_ids, total, n, pairs, blocks, a.stride(0), b.stride(0), b.stride(1),
        K=k, TOPK=topk, HAS_SCALE=scale is not None, PRECISION="ieee", BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        BLOCK_K=t.block_k, GROUP_M=t.group_m, num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _sum_kernel(
    x_ptr, ids_ptr, map_ptr, out_ptr, E, H, HAS_MAP: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + token * TOPK + k)
        there = (expert >= 0) & (expert < E)
        if HAS_MAP:
            there = there & (tl.load(map_ptr + tl.where(there, expert, 0)) >= 0)
        row = x_ptr + (token * TOPK + k) * H
        acc += tl.load(row + cols, mask=(cols < H) & there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < H)


def sum_over_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """x: [T * K, H], topk_ids: [T, K]. Returns [T, H], the sum of each token's rows; rows of no expert are not read."""
    tokens, topk = topk_ids.shape
    hidden = x.shape[1]
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(hidden), 1024)
    grid = (tokens, cdiv(hidden, block))
    launch_kernel(
        _sum_kernel, grid,
        x, topk_ids, expert_map, out, num_experts, hidden, HAS_MAP=expert_map is not None, TOPK=topk, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out
