"""Parts of the kernels that run in chunks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp2 takes fewer instructions than exp


@triton.jit
def sequence_of(cu_ptr, chunk, B, STEPS, SIZE):
    # The last sequence whose first chunk, of SIZE tokens, has at most this number.
    low = chunk * 0
    high = low + B
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(cu_ptr + middle) // SIZE + middle <= chunk
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def limited(g):
    # exp(-40) is nothing, and sums of a chunk stay small enough that their differences are exact to 1e-4.
    return tl.maximum(g.to(tl.float32), -40.0)


@triton.jit
def inverse(L, PRECISION: tl.constexpr):
    # (I + L)^-1 of a strictly lower triangular L [64, 64]: forward substitution in the diagonal blocks of 16, then
    # (I + M)^-1 = I - M + M^2 - M^3 for what is left, whose blocks are strictly lower triangular.
    block = tl.arange(0, 4)
    r = tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(L, (4, 16, 4, 16))
    D = -tl.sum(tl.where(diagonal, parts, 0.0), axis=2)  # [4, 16, 16]
    for i in range(1, 16):
        row = tl.sum(tl.where(r[None, :, None] == i, D, 0.0), axis=1)  # [4, 16]
        row += tl.sum(row[:, :, None] * D, axis=1)
        D = tl.where(r[None, :, None] == i, row[:, None, :], D)
    D += tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0)
    whole = tl.reshape(tl.where(diagonal, D[:, :, None, :], 0.0), (64, 64))
    rest = tl.reshape(tl.where(diagonal, 0.0, parts), (64, 64))
    M = tl.dot(whole, rest, input_precision=PRECISION)
    square = tl.dot(M, M, input_precision=PRECISION)
    series = square - M - tl.dot(M, square, input_precision=PRECISION)
    return whole + tl.dot(series, whole, input_precision=PRECISION)
