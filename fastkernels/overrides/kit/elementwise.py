"""Shared by elementwise ops of one tensor: the launch of their kernels, and parts of their declarations."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.spec import Axis, Tensor
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import launch_kernel
from fastkernels.overrides.kit.rows import rows

TILE = 1024  # elements of a program; with 4 warps, a thread loads 16 bytes of a 2-byte dtype
LARGE, LARGE_TILE = (
    1 << 23,
    4096,
)  # from LARGE elements on, larger tiles keep four times as many loads in flight

# For declarations: the tensor, a gate and an up projection in one row, and the result.
X = Tensor("x", "tokens inner? d", std=2)
PAIR = Tensor("x", "tokens inner? 2*d", std=2)
OUT = Tensor("out", "tokens inner? d")
AXES = {"tokens": Axis.per_call(), "inner": Axis.count(), "d": Axis.width()}


@triton.jit
def normal_cdf(x):
    # The lower half is 2^p(|x|), with p the minimax polynomial of the logarithm on [0, 6]. The relative error is 2e-5,
    # and the error of x times the result 4e-7, far below the rounding of 16-bit dtypes. erf costs more: it selects the
    # coefficients of one of two polynomials per element. p decreases monotonically: the tails underflow to 0, and NaN
    # propagates.
    t = tl.abs(x)
    p = -9.003705372379045e-07 * t + 4.6359331463463604e-05
    p = p * t - 8.382215746678412e-04
    p = p * t + 8.249635808169842e-03
    p = p * t - 5.3622160106897354e-02
    p = p * t - 4.5864081382751465e-01
    p = p * t - 1.1512374877929688
    tail = tl.exp2(p * t - 0.9999899864196777)
    return tl.where(x > 0, 1.0 - tail, tail)


def launch(kernel: Any, x: torch.Tensor, large: int = LARGE_TILE, **constants: Any) -> torch.Tensor:
    """Run kernel(x, out, n_inner, stride0, stride1, D, n_tiles, ..., TILE, OVERLAP); returns out, a new tensor like x.

    Each program computes a tile of one row. A contiguous x is treated as one row; for others, see rows.rows.
    large: tile size for tensors of at least LARGE elements.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.is_contiguous():
        found, d = (1, 0, 0), x.numel()
    else:
        strided, d = rows(x), x.shape[-1]
        assert strided is not None, x.stride()
        found = strided
    tile = large if out.numel() >= LARGE and d >= large else TILE
    n_tiles = cdiv(d, tile)
    grid = (x.numel() // d * n_tiles,)
    launch_kernel(kernel, grid, x, out, *found, d, n_tiles, **constants, TILE=tile, num_warps=4)
    return out


def like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """The fake implementation: an empty tensor like x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
