"""Pooling windows over one to three dimensions: the maximum or the mean of each window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.conv.spatial import each, lifted, padded, spatial, unsupported
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

TILE = 256  # elements of the result of a program
Ints = Sequence[int]


def reference(
    x: torch.Tensor,
    window: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    maximum: bool = False,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> torch.Tensor:
    """x: [B, C, ...]. One number of window, stride (none: the window) and padding stands for all dimensions.

    Padding never is a maximum; in a mean it counts as zeros, or with count_include_pad=False not at all. With
    ceil_mode a last window may pass the end. Means are computed in at least float32.
    """
    n = spatial("pool", x)
    sizes = _settings(x, window, stride, padding)
    if maximum:
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1](x, *sizes, 1, ceil_mode)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    return mean(y, *sizes, ceil_mode, count_include_pad).to(x.dtype)


def _settings(
    x: torch.Tensor, window: Ints, stride: Ints, padding: Ints
) -> tuple[list[int], list[int], list[int]]:
    n = spatial("pool", x)
    sizes = each("pool", "window", window, n, 1)
    steps, edges = each("pool", "stride", stride or sizes, n, 1), each("pool", "padding", padding, n)
    if any(2 * p > k for p, k in zip(edges, sizes, strict=True)):
        raise ValueError(f"pool: padding {edges} must be at most half of the window {sizes}")
    return sizes, steps, edges


def output_shape(
    x: torch.Tensor, window: Ints, stride: Ints = (), padding: Ints = (0,), maximum: bool = False,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> list[int]:  # fmt: skip
    """The shape of the result. Raises ValueError."""
    made = []
    for n, k, s, p in zip(x.shape[2:], *_settings(x, window, stride, padding), strict=True):
        count = -(-(n + 2 * p - k) // s) + 1 if ceil_mode else (n + 2 * p - k) // s + 1
        if ceil_mode and (count - 1) * s >= n + p:  # a window must begin inside
            count -= 1
        made.append(count)
    return [*x.shape[:2], *made]


@triton.jit
def _pool_kernel(
    x_ptr, out_ptr, n, C, D, H, W, OD, OH, OW, x_stride_b, x_stride_c, x_stride_d, x_stride_h, x_stride_w,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, MAXIMUM: tl.constexpr, PADS: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    ow, oh, od = at % OW, (at // OW) % OH, (at // (OW * OH)) % OD
    plane = at // (OW * OH * OD)
    x_at = x_ptr + (plane // C) * x_stride_b + (plane % C) * x_stride_c
    d0, h0, w0 = od * SD - PD, oh * SH - PH, ow * SW - PW
    if MAXIMUM:
        found = tl.full([TILE], float("-inf"), tl.float32)
    else:
        found = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.float32)
    for k in range(KD * KH * KW):
        d, h, w = d0 + k // (KH * KW), h0 + (k // KW) % KH, w0 + k % KW
        inside = known & (d >= 0) & (h >= 0) & (w >= 0) & (d < D) & (h < H) & (w < W)
        value = tl.load(x_at + d * x_stride_d + h * x_stride_h + w * x_stride_w, mask=inside, other=0.0).to(
            tl.float32
        )
        if MAXIMUM:
            better = inside & ((value > found) | (value != value))  # NaN propagates
            found = tl.where(better & (found == found), value, found)
        else:
            found += value
            counted = (d < D + PD) & (h < H + PH) & (w < W + PW) if PADS else inside
            count += tl.where(counted, 1.0, 0.0)
    if not MAXIMUM:
        found = found / tl.maximum(count, 1.0)  # 0 outside the result
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=known)


def _triton(
    x: torch.Tensor, window: Ints, stride: Ints = (), padding: Ints = (0,), maximum: bool = False,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> torch.Tensor:  # fmt: skip
    sizes, steps, edges = _settings(x, window, stride, padding)
    shape = output_shape(x, window, stride, padding, maximum, ceil_mode)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    wide = lifted(x)
    launch_kernel(
        _pool_kernel, (cdiv(out.numel(), TILE),),
        wide, out, math.prod(shape), *wide.shape[1:], *padded(shape[2:], 1), *wide.stride(),
        **dict(zip(("KD", "KH", "KW"), padded(sizes, 1), strict=True)),
        **dict(zip(("SD", "SH", "SW"), padded(steps, 1), strict=True)),
        **dict(zip(("PD", "PH", "PW"), padded(edges, 0), strict=True)),
        MAXIMUM=maximum, PADS=count_include_pad, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out


pool = define(
    "pool(Tensor x, int[] window, int[] stride=[], int[] padding=[0], bool maximum=False, bool ceil_mode=False,"
    " bool count_include_pad=True) -> Tensor",
    fake=lambda x, *args, **kwargs: x.new_empty(output_shape(x, *args, **kwargs)),
    providers=(
        Provider("triton", _triton, supports=lambda x, *_: unsupported(x)),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_SIZE = "({name}+2*padding[{i}]-window[{i}])//stride[{i}]+1"

SPEC = OpSpec(
    name="pool",
    level=1,
    reference=reference,
    op=pool,
    cases=(  # ResNet-50's stem on 32 images; PoolFormer's mixing of tokens
        _case("resnet_stem", "model", batch=32, channels=64, rows=112, columns=112, window=(3, 3), stride=(2, 2),
              padding=(1, 1), maximum=True),
        _case("poolformer", "model", weight=6, batch=8, channels=320, rows=14, columns=14, window=(3, 3),
              stride=(1, 1), padding=(1, 1), count_include_pad=False),
        _case("poolformer_1", "model", weight=6, batch=1, channels=320, rows=14, columns=14, window=(3, 3),
              stride=(1, 1), padding=(1, 1), count_include_pad=False),
        _case("spp_13", "model", batch=1, channels=64, rows=20, columns=20, window=(13, 13), stride=(1, 1),
              padding=(6, 6), maximum=True),
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1, window=(1, 1), stride=(1, 1)),
        _case("sequence", "odd", batch=2, channels=5, rows=1, columns=33, window=(1, 3), stride=(1, 2), maximum=True),
        _case("maximum", "odd", batch=2, channels=3, rows=9, columns=13, window=(3, 2), stride=(2, 2), padding=(1, 0),
              maximum=True),
        _case("mean", "odd", "float32", batch=1, channels=5, rows=10, columns=9, window=(2, 3), stride=(2, 3)),
        _case("mean_inside", "odd", "float16", batch=1, channels=3, rows=7, columns=8, window=(3, 3), stride=(1, 2),
              padding=(1, 1), count_include_pad=False),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Scalar("window"),
        Scalar("stride"),
        Scalar("padding"),
        Scalar("maximum", default=False),
        Scalar("ceil_mode", default=False),
        Scalar("count_include_pad", default=True),
    ),
    outputs=(
        Tensor("out", f"batch channels {_SIZE.format(i=0, name='rows')} {_SIZE.format(i=1, name='columns')}"),
    ),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "window": Axis(),
        "stride": Axis(),
        "padding": Axis((0, 0)),
    },
    constraints=("rows >= window[0]", "columns >= window[1]", "not ceil_mode"),
    flops="batch * channels * rows * columns",
)  # fmt: skip
