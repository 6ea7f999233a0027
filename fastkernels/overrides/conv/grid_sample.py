"""Values of images at given places (Jaderberg et al., arXiv 1506.02025), the core of deformable attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.conv.spatial import unsupported
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

TILE = 256  # elements of the result of a program


def reference(
    x: torch.Tensor,
    grid: torch.Tensor,
    nearest: bool = False,
    border: bool = False,
    align_corners: bool = False,
) -> torch.Tensor:
    """x: [B, C, H, W]; grid: [B, OH, OW, 2], (column, row) from -1 to 1. Returns [B, C, OH, OW], interpolated linearly.

    nearest: the nearest value instead. Outside the image are zeros, with border=True its outer pixels.
    align_corners: -1 and 1 are the centers of the outer pixels, else their outer edges.
    """
    _check(x, grid)
    acc = torch.promote_types(x.dtype, torch.float32)
    mode, padding = "nearest" if nearest else "bilinear", "border" if border else "zeros"
    return F.grid_sample(x.to(acc), grid.to(acc), mode, padding, align_corners).to(x.dtype)


def _check(x: torch.Tensor, grid: torch.Tensor) -> None:
    if x.dim() != 4 or grid.dim() != 4 or grid.shape[3] != 2 or grid.shape[0] != x.shape[0]:
        raise ValueError(
            f"grid_sample: x must be [B, C, H, W] and grid [B, OH, OW, 2], got {tuple(x.shape)}, {tuple(grid.shape)}"
        )


@triton.jit
def _place(at, N, BORDER: tl.constexpr, CORNERS: tl.constexpr):
    # A coordinate from -1 to 1 in pixels.
    place = (at + 1.0) * 0.5 * (N - 1) if CORNERS else ((at + 1.0) * N - 1.0) * 0.5
    if BORDER:
        place = tl.minimum(tl.maximum(place, 0.0), N - 1.0)
    return place


@triton.jit
def _grid_sample_kernel(
    x_ptr, grid_ptr, out_ptr, n, C, H, W, P, x_stride_b, x_stride_c, x_stride_h, x_stride_w,
    NEAREST: tl.constexpr, BORDER: tl.constexpr, CORNERS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    plane = at // P
    image = plane // C
    grid_at = grid_ptr + (image * P + at % P) * 2
    w = _place(tl.load(grid_at, mask=known, other=0.0).to(tl.float32), W, BORDER, CORNERS)
    h = _place(tl.load(grid_at + 1, mask=known, other=0.0).to(tl.float32), H, BORDER, CORNERS)
    x_at = x_ptr + image * x_stride_b + (plane % C) * x_stride_c
    found = tl.zeros([TILE], tl.float32)
    if NEAREST:
        # half to even, as torch
        low_h, low_w = tl.floor(h), tl.floor(w)
        odd_h, odd_w = low_h - 2.0 * tl.floor(low_h * 0.5), low_w - 2.0 * tl.floor(low_w * 0.5)
        h = tl.where(h - low_h == 0.5, low_h + odd_h, tl.floor(h + 0.5))
        w = tl.where(w - low_w == 0.5, low_w + odd_w, tl.floor(w + 0.5))
        inside = known & (h >= 0) & (w >= 0) & (h < H) & (w < W)
        where = h.to(tl.int64) * x_stride_h + w.to(tl.int64) * x_stride_w
        found = tl.load(x_at + where, mask=inside, other=0.0).to(tl.float32)
    else:
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                row, column = tl.floor(h) + i, tl.floor(w) + j
                share = (1.0 - tl.abs(h - row)) * (1.0 - tl.abs(w - column))
                inside = known & (row >= 0) & (column >= 0) & (row < H) & (column < W)
                where = row.to(tl.int64) * x_stride_h + column.to(tl.int64) * x_stride_w
                found += tl.load(x_at + where, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=known)


def _triton(
    x: torch.Tensor,
    grid: torch.Tensor,
    nearest: bool = False,
    border: bool = False,
    align_corners: bool = False,
) -> torch.Tensor:
    _check(x, grid)
    pixels = grid.shape[1] * grid.shape[2]
    out = torch.empty((*x.shape[:2], *grid.shape[1:3]), dtype=x.dtype, device=x.device)
    if out.numel():
        launch_kernel(
            _grid_sample_kernel, (cdiv(out.numel(), TILE),),
            x, grid.contiguous(), out, out.numel(), *x.shape[1:], pixels, *x.stride(),
            NEAREST=nearest, BORDER=border, CORNERS=align_corners, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out


grid_sample = define(
    "grid_sample(Tensor x, Tensor grid, bool nearest=False, bool border=False, bool align_corners=False) -> Tensor",
    fake=lambda x, grid, *args, **kwargs: x.new_empty((*x.shape[:2], *grid.shape[1:3])),
    providers=(
        Provider("triton", _triton, supports=lambda x, grid, *_: unsupported(x) or unsupported(grid)),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="grid_sample",
    level=1,
    reference=reference,
    op=grid_sample,
    cases=(  # RT-DETR at 640 px: the largest of three levels, 300 queries, 8 heads, 4 points
        _case("rt_detr", "model", weight=6, batch=8, channels=32, rows=80, columns=80, made_rows=300,
              made_columns=4),
        _case("rt_detr_20", "model", weight=6, batch=1, channels=32, rows=20, columns=20, made_rows=300,
              made_columns=4),
        _case("rt_detr_40", "model", weight=6, batch=1, channels=32, rows=40, columns=40, made_rows=300,
              made_columns=4),
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1, made_rows=1, made_columns=1),
        _case("half", "odd", "float16", batch=1, channels=5, rows=9, columns=3, made_rows=17, made_columns=1),
        _case("linear", "odd", batch=2, channels=3, rows=5, columns=7, made_rows=6, made_columns=11),
        _case("corners", "odd", "float32", batch=1, channels=2, rows=6, columns=5, made_rows=63,
              made_columns=2,
              align_corners=True, border=True),
        _case("nearest", "odd", "float32", batch=1, channels=3, rows=5, columns=7, made_rows=9,
              made_columns=5,
              nearest=True),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Tensor("grid", "batch made_rows made_columns 2", "float32", std=0.6),
        Scalar("nearest", default=False),
        Scalar("border", default=False),
        Scalar("align_corners", default=False),
    ),
    outputs=(Tensor("out", "batch channels made_rows made_columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "made_rows": Axis.per_call(),
        "made_columns": Axis.per_call(),
    },
    flops="12 * batch * channels * made_rows * made_columns",
)  # fmt: skip
