"""The kernel that quantizes groups of columns to float8 e4m3. A token is a group of all its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.fp8 import fp8_inverse, fp8_scale, to_fp8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


@triton.jit(do_not_specialize=["total", "s_col"])
def groups_kernel(
    x_ptr, ub_ptr, q_ptr, s_ptr, x_stride0, x_stride1, n_inner, total, n_groups, group_size, s_row, s_col, min_absmax,
    HAS_UB: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A program processes GROUPS consecutive groups, which may span rows.
    at = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = at // n_groups, at % n_groups
    cols = tl.arange(0, BLOCK)
    mask = (at < total)[:, None] & (cols < group_size)[None, :]
    start = (row // n_inner).to(tl.int64) * x_stride0 + (row % n_inner).to(tl.int64) * x_stride1
    start += group * group_size
    x = tl.load(x_ptr + start[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(x), axis=1)
    if HAS_UB:
        absmax = tl.minimum(absmax, tl.load(ub_ptr).to(tl.float32))
    scale = fp8_scale(absmax, min_absmax, UE8M0)
    q = to_fp8(x * fp8_inverse(scale)[:, None])
    tl.store(q_ptr + at.to(tl.int64)[:, None] * group_size + cols[None, :], q, mask=mask)
    tl.store(s_ptr + row.to(tl.int64) * s_row + group.to(tl.int64) * s_col, scale, mask=at < total)


def launch_groups(
    x: torch.Tensor, scale_ub: torch.Tensor | None, q: torch.Tensor, s: torch.Tensor,
    rows: tuple[int, int, int], columns: int, width: int, min_absmax: float, scale_ue8m0: bool,
) -> None:  # fmt: skip
    """Write the values q and scales s of groups of `width` columns. rows: see kit/rows.py."""
    (n_inner, *strides), total, block = rows, x.numel() // width, next_power_of_2(width)
    # A tile of 4096 values keeps 32 loads per thread in flight; few groups are first spread over 132 multiprocessors.
    groups = max(1, min(4096 // block, next_power_of_2(cdiv(total, 512))))
    s_row, s_col = s.stride() if s.dim() == 2 else (columns // width, 1)
    launch_kernel(
        groups_kernel, (max(cdiv(total, groups), 1),),
        x, scale_ub, q, s, *strides, n_inner, total, columns // width, width, s_row, s_col, min_absmax,
        HAS_UB=scale_ub is not None, UE8M0=scale_ue8m0, GROUPS=groups, BLOCK=block,
        num_warps=min(max(groups * block // 1024, 1), 16),
    )  # fmt: skip
