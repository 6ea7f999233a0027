"""Triton kernels for mixtures of experts: the grouped matrix product and the sum over the experts of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel, overlap
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, ROW
from fastkernels.overrides.moe.moe_tiles import Tiles
from fastkernels.overrides.routing.sorted_pairs import Sorted


class Scales(NamedTuple):
    """Scales of float8 matrices a and b, with their strides.

    kind                         ROW: one scale per row, shared by several rows with a stride of 0; BLOCK: one scale per
                                 128 values along K, and in b per 128 rows
    a, a_row, a_block            scales of a: strides of a row and of a block of K
    b, b_expert, b_row, b_block  scales of b: strides of an expert, of a row (BLOCK: 128 rows) and of a block of K
    """

    kind: int
    a: torch.Tensor
    a_row: int
    a_block: int
    b: torch.Tensor
    b_expert: int
    b_row: int
    b_block: int


# The number of pairs changes between calls: one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["E", "n_pairs", "n_blocks", "as_block"])
def grouped_gemm_kernel(
    a_ptr, b_ptr, c_ptr, scale_ptr, pairs_ptr, experts_ptr, total_ptr, as_ptr, bs_ptr, N, E, n_pairs, n_blocks,
    a_stride, b_expert, b_stride, as_row, as_block, bs_expert, bs_row, bs_block,
    K: tl.constexpr, TOPK: tl.constexpr, HAS_SCALE: tl.constexpr, SORTED: tl.constexpr, FP8: tl.constexpr,
    BLOCKS: tl.constexpr, UPCAST: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, OVERLAP: tl.constexpr, ZEROS: tl.constexpr = False,
):  # fmt: skip
    follow(OVERLAP)
    # GROUP_M blocks of rows run next to each other, column by column, and share an expert's matrix through L2.
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * columns) * GROUP_M
    height = min(n_blocks - first, GROUP_M)
    block = first + pid % (GROUP_M * columns) % height
    col = pid % (GROUP_M * columns) // height
    if block * BLOCK_M >= (tl.load(total_ptr) if SORTED else n_blocks * BLOCK_M):
        return
    if SORTED:
        pairs = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, n_pairs)
    there = pairs < n_pairs
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= E):
        if ZEROS:  # the rows of experts on other ranks are read, too
            none = c_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
            zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=c_ptr.dtype.element_ty)
            tl.store(none, zeros, mask=there[:, None] & (cols < N)[None, :])
        return
    rows = (tl.where(there, pairs, 0) // TOPK).to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    # a is [rows, K] and b is [K, cols]. With SWAP they are [K, rows] and [cols, K], and the product is b a.
    a_k = ks[:, None] if SWAP else ks[None, :]
    a_there = there[None, :] if SWAP else there[:, None]
    a_at = a_ptr + (rows[None, :] if SWAP else rows[:, None]) * a_stride + a_k
    b_k = ks[None, :] if SWAP else ks[:, None]
    b_there = (cols < N)[:, None] if SWAP else (cols < N)[None, :]
    b_at = b_ptr + expert * b_expert
    b_at += (cols.to(tl.int64)[:, None] if SWAP else cols.to(tl.int64)[None, :]) * b_stride + b_k
    if FP8:
        as_at = as_ptr + rows * as_row
        # The columns of a tile lie in one block of b's rows, or in several.
        of_cols = (col * BLOCK_N // 128 if BLOCK_N <= 128 else cols // 128) if BLOCKS else cols
        bs_at = bs_ptr + expert * bs_expert + of_cols * bs_row
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_at + k, mask=a_there, other=0.0)
            b = tl.load(b_at + k, mask=b_there, other=0.0)
        else:
            a = tl.load(a_at + k, mask=a_there & (a_k < K - k), other=0.0)
            b = tl.load(b_at + k, mask=b_there & (b_k < K - k), other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if BLOCKS:
            part = tl.dot(b, a) if SWAP else tl.dot(a, b)
            a_s = tl.load(as_at + k // 128 * as_block)
            if BLOCK_N <= 128:
                scale = a_s * tl.load(bs_at + k // 128 * bs_block)
                acc += part * (scale[None, :] if SWAP else scale[:, None])
            else:
                b_s = tl.load(bs_at + k // 128 * bs_block, mask=cols < N, other=0.0)
                acc += part * (b_s[:, None] * a_s[None, :] if SWAP else a_s[:, None] * b_s[None, :])
        elif FP8 and BLOCK_M < 128:
            # Hopper's tensor cores accumulate FP8 with 14 bits. Short sums are free where memory is the limit.
            acc += tl.dot(b, a) if SWAP else tl.dot(a, b)
        else:
            acc = (
                tl.dot(b, a, acc, input_precision="ieee")
                if SWAP
                else tl.dot(a, b, acc, input_precision="ieee")
            )
    if SWAP:
        acc = tl.trans(acc)
    if FP8 and not BLOCKS:
        b_s = tl.load(bs_at, mask=cols < N, other=0.0)
        acc *= tl.load(as_at)[:, None] * b_s[None, :]
    if HAS_SCALE:
        acc *= tl.load(scale_ptr + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    to = c_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=there[:, None] & (cols < N)[None, :])


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    pairs: Sorted,
    topk: int,
    scale: torch.Tensor | None,
    t: Tiles,
    scales: Scales | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a: [pairs / topk, K]; b: [E, N, K]; scale: one factor per pair, or None; scales: for float8 e4m3 a and b.

    Returns [pairs, N] in a's dtype, or `out`: row i is scale[i] * b[expert of pair i] @ a[i / topk]. Rows without a
    local expert are not written.
    """
    n, k = b.shape[1:]
    c = torch.empty((pairs.n_pairs, n), dtype=a.dtype, device=a.device) if out is None else out
    grid = (pairs.blocks * cdiv(n, t.block_n),)
    of_blocks = scales is not None and scales.kind == BLOCK
    where = Scales(ROW, a, 0, 0, b, 0, 0, 0) if scales is None else scales
    grouped_gemm_kernel[grid](
        a, b, c, scale, pairs.pairs, pairs.experts, pairs.total, where.a, where.b, n, b.shape[0], pairs.n_pairs,
        pairs.blocks, a.stride(0), b.stride(0), b.stride(1), where.a_row, where.a_block, where.b_expert, where.b_row,
        where.b_block, K=k, TOPK=topk, HAS_SCALE=scale is not None, SORTED=pairs.pairs is not None,
        FP8=scales is not None, BLOCKS=of_blocks, UPCAST=scales is not None and a.device.type == "cpu", SWAP=t.swap,
        BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=min(t.block_k, BLOCK) if of_blocks else t.block_k,
        GROUP_M=t.group_m, num_warps=t.num_warps, num_stages=t.num_stages,
        **(overlap(a.device, grid) if t.early else {"OVERLAP": False}),
    )  # fmt: skip
    return c


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
    """x: [T * K, H]; topk_ids: [T, K]. Returns [T, H], the sum of each token's rows; rows without a local expert are
    not read."""
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
