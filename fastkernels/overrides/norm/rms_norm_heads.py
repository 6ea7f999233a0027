"""Distribute a norm's rows over programs: several short rows (query and key heads) per program; many long rows are
read twice. The summation order within a row never depends on the number of rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import MOST, follow, launch_kernel

WIDEST = 256  # channels of a row, padded to a power of two
NUMBERS, WARPS = 1024, 4  # of a program: 8 elements per thread, 16 bytes in 16-bit dtypes


def twice(count: int, block: int) -> bool:
    """Whether to load rows of `block` padded channels again after the reduction, from the cache. Fewer registers per
    thread raise the occupancy, which pays for many rows of 4096; other widths were not measured.
    """
    return count > MOST and block == 4096


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_heads_kernel(
    x_ptr, res_ptr, w_ptr, out_ptr, x_stride0, x_stride1, res_stride0, res_stride1, n_inner, n_rows, H, H_VAR, eps,
    HAS_RES: tl.constexpr, HAS_W: tl.constexpr, CAST_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outer, inner = row // n_inner, row % n_inner
    cols = tl.arange(0, BLOCK)
    mask = (row < n_rows)[:, None] & (cols < H)[None, :]
    x_at = x_ptr + (outer * x_stride0 + inner * x_stride1)[:, None] + cols[None, :]
    raw = tl.load(x_at, mask=mask, other=0.0)
    if HAS_W:
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    h = raw.to(tl.float32)
    if HAS_RES:
        res_at = res_ptr + (outer * res_stride0 + inner * res_stride1)[:, None] + cols[None, :]
        h += tl.load(res_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(res_at, h.to(res_ptr.dtype.element_ty), mask=mask)
    squares = tl.where((cols < H_VAR)[None, :], h * h, 0.0)
    y = h * tl.rsqrt(tl.sum(squares, axis=1) / H_VAR + eps)[:, None]
    if HAS_W:
        if CAST_FIRST:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y *= w[None, :]
    tl.store(out_ptr + row[:, None] * H + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_heads(
    count: int, given: tuple[Any, ...], norm: tuple[Any, ...], how: dict[str, bool], block: int
) -> None:
    """Launch the kernel on `count` rows of `block` padded channels; the other arguments are rms_norm's."""
    rows = NUMBERS // block
    grid = (cdiv(count, rows),)
    launch_kernel(
        _rms_norm_heads_kernel, grid, *given, count, *norm, **how, ROWS=rows, BLOCK=block, num_warps=WARPS
    )
