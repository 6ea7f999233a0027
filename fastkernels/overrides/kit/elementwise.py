"""What ops of one tensor, element by element, share: how a kernel is laid over it, and what their SPECs say."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.spec import Axis, Tensor
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import launch_kernel
from fastkernels.overrides.kit.rows import rows

TILE = 1024  # with 4 warps, 16 bytes a thread of what is 2 bytes wide
# For declarations: the tensor, a gate and an up projection side by side, and the result.
X = Tensor("x", "tokens inner? d", std=2)
PAIR = Tensor("x", "tokens inner? 2*d", std=2)
OUT = Tensor("out", "tokens inner? d")
AXES = {"tokens": Axis.per_call(), "inner": Axis.count(), "d": Axis.width()}

LARGE, LARGE_TILE = 1 << 23, 4096  # elements from which on a thread has four times as much on its way


@triton.jit
def normal_cdf(x):
    # 2^p(|x|) for the lower half, p the logarithm's best polynomial from 0 to 6: the normal distribution to 2e-5 of its
    # value and x times it to 4e-7, both far under what 16 bits round. erf has two polynomials, and of each number both
    # sets of coefficients are looked up. p falls for ever: far out there is 0, and not a number stays that.
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
    """A new tensor like x, which kernel(x, out, n_inner, stride0, stride1, D, n_tiles, ..., TILE, OVERLAP) has filled.

    One program a (row, tile of columns). A contiguous x is one row; another has the rows that `_rows.rows` finds.
    large: elements of a tile where there are LARGE of them.
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
    """The shape function."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
