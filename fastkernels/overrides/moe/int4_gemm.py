"""Triton kernel for mixtures of experts with 4-bit weights: the grouped matrix product, which dequantizes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.linear.linear_int4 import centered
from fastkernels.overrides.moe.moe_tiles import Tiles
from fastkernels.overrides.moe.sorted_pairs import Sorted


# The number of pairs changes between calls: one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["E", "n_pairs", "n_blocks"])
def _int4_gemm_kernel(
    a_ptr, b_ptr, s_ptr, z_ptr, c_ptr, scale_ptr, pairs_ptr, experts_ptr, total_ptr, N, E, n_pairs, n_blocks, a_stride,
    K: tl.constexpr, GROUP: tl.constexpr, TOPK: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_SCALE: tl.constexpr,
    SORTED: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    # GROUP_M blocks of rows run next to each other, column by column, and share an expert's matrix through L2.
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * columns) * GROUP_M
    height = min(n_blocks - first, GROUP_M)
    block = first + pid % (GROUP_M * columns) % height
    col = pid % (GROUP_M * columns) // height
    if block * BLOCK_M >= (tl.load(total_ptr) if SORTED else n_blocks * BLOCK_M):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if SORTED:
        pairs = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, n_pairs)
    there = pairs < n_pairs
    rows = (tl.where(there, pairs, 0) // TOPK).to(tl.int64)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    # As in linear_int4: the weight is the left matrix, BLOCK_K divides GROUP, a byte has columns that are 16 apart.
    at = expert * N + tl.minimum(cols, N - 1)  # a row past the end is the last row again
    bytes = tl.arange(0, BLOCK_K // 2)
    b_at = b_ptr + at[:, None] * (K // 2) + bytes[None, :]
    a_at = a_ptr + rows[None, :] * a_stride + (bytes // 16 * 32 + bytes % 16)[:, None]
    scales: tl.constexpr = K // GROUP
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        b = tl.load(b_at + k // 2)
        low = tl.load(a_at + k, mask=there[None, :], other=0.0)
        high = tl.load(a_at + k + 16, mask=there[None, :], other=0.0)
        scale = tl.load(s_ptr + at * scales + k // GROUP).to(tl.float32)
        if HAS_ZERO:
            zero = tl.load(z_ptr + at * scales + k // GROUP)[:, None]
        else:
            zero = tl.full((BLOCK_N, 1), 8, dtype=tl.uint8)
        if UPCAST:
            low, high = low.to(tl.float32), high.to(tl.float32)
        part = tl.dot(centered(b & 15, zero, a_ptr, UPCAST), low, input_precision="ieee")
        part = tl.dot(centered(b >> 4, zero, a_ptr, UPCAST), high, part, input_precision="ieee")
        acc += part * scale[:, None]
    out = tl.trans(acc)
    if HAS_SCALE:
        out *= tl.load(scale_ptr + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    to = c_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(to, out.to(c_ptr.dtype.element_ty), mask=there[:, None] & (cols < N)[None, :])


def int4_gemm(
    a: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, b_zero: torch.Tensor | None, pairs: Sorted, topk: int,
    scale: torch.Tensor | None, t: Tiles,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K]; b: uint8 [E, N, K / 2] and its scales and zero points [E, N, G] as in linear_int4, both
    contiguous; scale: one factor per pair, or None.

    Returns [pairs, N] in a's dtype: row i is scale[i] * b[e] @ a[i / topk], e the expert of pair i. Rows without a
    local expert are not written.
    """
    n, k = b.shape[1], a.shape[1]
    out = torch.empty((pairs.n_pairs, n), dtype=a.dtype, device=a.device)
    group = k // b_scale.shape[2]
    grid = (pairs.blocks * cdiv(n, t.block_n),)
    _int4_gemm_kernel[grid](
        a, b, b_scale, b_zero, out, scale, pairs.pairs, pairs.experts, pairs.total, n, b.shape[0], pairs.n_pairs,
        pairs.blocks, a.stride(0), K=k, GROUP=group, TOPK=topk, HAS_ZERO=b_zero is not None,
        HAS_SCALE=scale is not None, SORTED=pairs.pairs is not None,
        UPCAST=a.device.type == "cpu" or a.dtype == torch.float32, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        BLOCK_K=next(size for size in (128, 64, 32) if size <= t.block_k and group % size == 0), GROUP_M=t.group_m,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return out


def int4_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles for an average number of rows per expert; decoded weights take registers, so tiles are small."""
    block_m = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        return Tiles(block_m, 64, 32, 8, 4, 2)
    return Tiles(16, 64, 128, 1, 4, 4) if block_m == 16 else Tiles(64, 128, 64, 8, 8, 3)
