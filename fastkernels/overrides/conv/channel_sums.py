"""Sums over the places of each channel, of values or of their squares: global pooling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

BLOCK_T = 32
SPAN, MOST = 256, 16  # places that a program adds up, and parts of an image


@triton.jit
def _channel_sums_kernel(
    x_ptr, out_ptr, T, C, span, stride_b, stride_t, stride_c,
    SQUARES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    x_at = x_ptr + image * stride_b + cols.to(tl.int64)[None, :] * stride_c
    acc = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for begin in range(0, span, BLOCK_T):
        at = begin + tl.arange(0, BLOCK_T)
        t = part * span + at
        known = ((at < span) & (t < T))[:, None] & (cols < C)[None, :]
        x = tl.load(x_at + t[:, None] * stride_t, mask=known, other=0.0).to(tl.float32)
        acc += x * x if SQUARES else x
    tl.store(out_ptr + (image * tl.num_programs(1) + part) * C + cols, tl.sum(acc, axis=0), mask=cols < C)


def block_of(channels: int) -> int:
    """The channels of a program."""
    return min(64, next_power_of_2(channels))


def channel_sums(
    x: torch.Tensor, squares: bool = False, block_t: int = BLOCK_T, programs: int = 1
) -> torch.Tensor:
    """x [B, T, C] to [B, parts, C] in float32, whose sum over the parts is that over the T places.

    block_t   places that a program reads at once
    programs  that are wanted: of few images and channels, parts are smaller than SPAN
    """
    batch, places, channels = x.shape
    columns = cdiv(channels, block_of(channels))
    parts = min(MOST, max(cdiv(places, SPAN), min(cdiv(programs, batch * columns), cdiv(places, block_t))))
    span = cdiv(places, parts)
    if programs > 1:  # whole blocks, of which no program has one more than it needs
        span = cdiv(span, block_t) * block_t
        parts = cdiv(places, span)
    out = torch.empty(batch, parts, channels, dtype=torch.float32, device=x.device)
    launch_kernel(
        _channel_sums_kernel, (batch, parts, columns),
        x, out, places, channels, span, *x.stride(),
        SQUARES=squares, BLOCK_T=block_t, BLOCK_C=block_of(channels), num_warps=4,
    )  # fmt: skip
    return out
