"""Triton kernel for mixtures of experts with biases: the grouped matrix product with weights in floats or in MXFP4."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.activation.swigluoai_and_mul import gated
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, overlap
from fastkernels.overrides.moe.moe_tiles import Tiles
from fastkernels.overrides.routing.sorted_pairs import Sorted


# The number of pairs changes between calls: one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["E", "n_pairs", "n_blocks"])
def _biased_gemm_kernel(
    a_ptr, b_ptr, s_ptr, bias_ptr, c_ptr, scale_ptr, pairs_ptr, experts_ptr, total_ptr, N, E, n_pairs, n_blocks,
    a_stride, b_expert, b_stride, s_expert, s_stride, bias_stride, c_stride, alpha, limit,
    K: tl.constexpr, TOPK: tl.constexpr, HAS_SCALE: tl.constexpr, SORTED: tl.constexpr, MXFP4: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GLU: tl.constexpr, EACH: tl.constexpr, OVERLAP: tl.constexpr,
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
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    if SORTED:
        pairs = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, n_pairs)
    there = pairs < n_pairs
    rows = (tl.where(there, pairs, 0) // TOPK).to(tl.int64)
    tile = tl.arange(0, BLOCK_N)
    if GLU:
        # A tile may have any rows of the matrix, in any order. An up value is 8 rows below its gate, where Hopper's
        # tensor cores hold both in one lane, and results are in the order in which the next product reads them.
        place = col * (BLOCK_N // 2) + tile // 16 * 8 + tile % 8
        if EACH:
            place = place % (EACH // 4) * 4 + place // (EACH // 4)
        cols = 2 * place + tile % 16 // 8
    else:
        cols = col * BLOCK_N + tile
    # The weight is the left operand [cols, K]: Hopper's tensor cores read it from registers, where it is decoded.
    a_at = a_ptr + rows[None, :] * a_stride
    b_at = b_ptr + expert * b_expert + cols.to(tl.int64)[:, None] * b_stride
    inside = (cols < N)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if MXFP4:
        QUICK: tl.constexpr = a_ptr.dtype.element_ty == tl.bfloat16 and not UPCAST
        TYPE: tl.constexpr = tl.float32 if UPCAST else a_ptr.dtype.element_ty
        ws = tl.arange(0, BLOCK_K // 4)
        ss = tl.arange(0, BLOCK_K // 32)
        s_at = s_ptr + expert * s_expert + cols.to(tl.int64)[:, None] * s_stride + ss[None, :]
        for k in range(0, K, BLOCK_K):
            left = (K - k) // 4
            b = tl.load(b_at + k // 4 + ws[None, :], mask=inside & (ws[None, :] < left), other=0)
            s = tl.load(s_at + k // 32, mask=inside & (ss[None, :] < (K - k) // 32), other=0)
            there_a = there[None, :] & (ws[:, None] < left)
            if QUICK:
                w0, w1, w2, w3 = mxfp4.decode_bfloat16(b, s)
            else:
                w0, w1, w2, w3 = mxfp4.decode(b, s)
            a = tl.load(a_at + k // 4 + ws[:, None], mask=there_a, other=0.0)
            acc = tl.dot(w0.to(TYPE), a.to(TYPE), acc, input_precision="ieee")
            a = tl.load(a_at + (K // 4 + k // 4) + ws[:, None], mask=there_a, other=0.0)
            acc = tl.dot(w1.to(TYPE), a.to(TYPE), acc, input_precision="ieee")
            a = tl.load(a_at + (K // 2 + k // 4) + ws[:, None], mask=there_a, other=0.0)
            acc = tl.dot(w2.to(TYPE), a.to(TYPE), acc, input_precision="ieee")
            a = tl.load(a_at + (K // 4 * 3 + k // 4) + ws[:, None], mask=there_a, other=0.0)
            acc = tl.dot(w3.to(TYPE), a.to(TYPE), acc, input_precision="ieee")
        if QUICK:
            acc *= mxfp4.RESTORE
    else:
        ks = tl.arange(0, BLOCK_K)
        for k in range(0, K, BLOCK_K):
            a = tl.load(a_at + k + ks[:, None], mask=there[None, :] & (ks[:, None] < K - k), other=0.0)
            b = tl.load(b_at + k + ks[None, :], mask=inside & (ks[None, :] < K - k), other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(b, a, acc, input_precision="ieee")
    bias = tl.load(bias_ptr + expert * bias_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    acc += bias[:, None]
    if GLU:
        pair = tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(pair, (BLOCK_N // 2, BLOCK_M, 2)))
        acc = gated(gate, up, alpha, limit)
        cols = col * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    out = tl.trans(acc)
    if HAS_SCALE:
        out *= tl.load(scale_ptr + pairs, mask=there, other=0.0).to(tl.float32)[:, None]
    to = c_ptr + pairs.to(tl.int64)[:, None] * c_stride + cols[None, :]
    inside = ((2 if GLU else 1) * cols < N)[None, :]
    tl.store(to, out.to(c_ptr.dtype.element_ty), mask=there[:, None] & inside)


def biased_gemm(
    a: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor | None, bias: torch.Tensor, pairs: Sorted, topk: int,
    scale: torch.Tensor | None, t: Tiles, glu: tuple[float, float] | None = None,
) -> torch.Tensor:  # fmt: skip
    """a: [pairs / topk, K]; b: [E, N, K], or with b_scale MXFP4 [E, N, K / 2]; bias: [E, N]; scale: of pairs, or None.

    With b_scale, a is a result of `mxfp4.by_words`.
    glu  alpha and limit of the swigluoai_and_mul that follows

    Returns [pairs, N] in a's dtype: row i is scale[i] * (b[e] @ a[i / topk] + bias[e]), e the expert of pair i. Rows
    without a local expert are not written. With glu, it is [pairs, N / 2], and with b_scale `by_words` of it.
    """
    n = b.shape[1]
    out = torch.empty((pairs.n_pairs, n if glu is None else n // 2), dtype=a.dtype, device=a.device)
    grid = (pairs.blocks * cdiv(n, t.block_n),)
    scales, each = b, 0  # scales are not read where there are none
    if b_scale is not None:
        scales, b = b_scale, b.view(torch.int16)
        each = 0 if glu is None else out.shape[1]
    _biased_gemm_kernel[grid](
        a, b, scales, bias, out, scale, pairs.pairs, pairs.experts, pairs.total, n, b.shape[0], pairs.n_pairs,
        pairs.blocks, a.stride(0), *b.stride()[:2], *scales.stride()[:2], bias.stride(0), out.stride(0),
        *(glu or (0.0, 0.0)), K=a.shape[1], TOPK=topk,
        HAS_SCALE=scale is not None, SORTED=pairs.pairs is not None, MXFP4=b_scale is not None,
        UPCAST=a.device.type == "cpu", BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, GROUP_M=t.group_m,
        GLU=glu is not None, EACH=each, num_warps=t.num_warps, num_stages=t.num_stages,
        **(overlap(a.device, grid) if t.early else {"OVERLAP": False}),
    )  # fmt: skip
    return out


def biased_tiles(rows: int, dtype: torch.dtype, packed: bool) -> Tiles:
    """Return the tiles for an average number of rows per expert; decoded weights take registers, so tiles are small.

    packed  whether weights are MXFP4
    """
    block_m = 16 if rows <= 16 else 64
    if dtype == torch.float32:
        return Tiles(block_m, 64, 64 if packed else 32, 8, 4, 2)
    if not packed or dtype != torch.bfloat16:
        return Tiles(16, 64, 128, 1, 4, 4) if block_m == 16 else Tiles(64, 128, 64, 8, 8, 3)
    if rows <= 16:
        return Tiles(16, 64, 256, 1, 4, 3)
    return Tiles(32 if rows <= 48 else 64, 128, 128, 8, 4, 3)
