"""Resampling of images and sequences to another size: nearest, linear or cubic (Keys, 1981) in each dimension."""

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
MODES = {"nearest": 1, "linear": 2, "cubic": 4}  # values of each dimension that a result depends on
_NAMES = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


def reference(
    x: torch.Tensor,
    size: Sequence[int],
    mode: str = "nearest",
    align_corners: bool = False,
    scales: Sequence[float] = (),
) -> torch.Tensor:
    """x: [B, C, ...]; size: of the result's dimensions after C. Computed in at least float32, rounded once.

    mode: 'nearest', 'linear' (bilinear, trilinear), or 'cubic' of two dimensions. scales: how much larger each
    dimension is, where it is not the quotient of the sizes. align_corners: the outer pixels' centers coincide.
    """
    n, size, _ = _settings(x, size, mode, align_corners, scales)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    named = mode if mode == "nearest" else _NAMES[mode][n - 1]
    corners = None if mode == "nearest" else align_corners
    if not scales:
        return F.interpolate(y, size, mode=named, align_corners=corners).to(x.dtype)
    return F.interpolate(y, scale_factor=list(scales), mode=named, align_corners=corners).to(x.dtype)


def _settings(
    x: torch.Tensor, size: Sequence[int], mode: str, align_corners: bool, scales: Sequence[float]
) -> tuple[int, list[int], list[float]]:
    """(dimensions, sizes, input pixels for each output pixel). Raises ValueError."""
    n = spatial("interpolate", x)
    if mode not in MODES or (mode == "cubic" and n != 2):
        raise ValueError(
            f"interpolate: mode {mode!r} of {n} dimensions; known: {', '.join(MODES)}, cubic of two"
        )
    size = each("interpolate", "size", size, n, 1)
    if scales and [math.floor(a * f) for a, f in zip(x.shape[2:], scales, strict=True)] != size:
        raise ValueError(f"interpolate: scales {list(scales)} of {tuple(x.shape[2:])} do not give {size}")
    if align_corners and mode != "nearest":
        steps = [(a - 1) / (b - 1) if b > 1 else 0.0 for a, b in zip(x.shape[2:], size, strict=True)]
    else:
        steps = [1 / f for f in scales] or [a / b for a, b in zip(x.shape[2:], size, strict=True)]
    return n, size, steps


@triton.jit
def _source(at, step, TAPS: tl.constexpr, CORNERS: tl.constexpr):
    # The coordinate of an output pixel in the input: a whole number, and the rest.
    if TAPS == 1 or CORNERS:
        place = at.to(tl.float32) * step
    else:
        place = (at.to(tl.float32) + 0.5) * step - 0.5
        if TAPS == 2:
            place = tl.maximum(place, 0.0)
    first = tl.floor(place)
    return first.to(tl.int32), place - first


@triton.jit
def _weight(i: tl.constexpr, rest, TAPS: tl.constexpr):
    # Of the value at first + i for two, first + i - 1 for four.
    if TAPS == 1:
        w = rest * 0.0 + 1.0
    elif TAPS == 2:
        w = 1.0 - rest if i == 0 else rest
    else:
        t = tl.abs(rest - (i - 1))
        near = ((1.25 * t - 2.25) * t) * t + 1.0  # A = -0.75
        far = ((-0.75 * t + 3.75) * t - 6.0) * t + 3.0
        w = tl.where(t <= 1.0, near, tl.where(t < 2.0, far, 0.0))
    return w


@triton.jit
def _interpolate_kernel(
    x_ptr, out_ptr, n, C, H, W, OH, OW, x_stride_b, x_stride_c, x_stride_h, x_stride_w, step_h, step_w,
    TAPS: tl.constexpr, CORNERS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    plane = at // (OW * OH)
    x_at = x_ptr + (plane // C) * x_stride_b + (plane % C) * x_stride_c
    first_h, rest_h = _source((at // OW) % OH, step_h, TAPS, CORNERS)
    first_w, rest_w = _source(at % OW, step_w, TAPS, CORNERS)
    BEFORE: tl.constexpr = 1 if TAPS == 4 else 0
    found = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(TAPS):
        h = tl.minimum(tl.maximum(first_h + i - BEFORE, 0), H - 1)
        row = tl.zeros([TILE], tl.float32)
        for j in tl.static_range(TAPS):
            w = tl.minimum(tl.maximum(first_w + j - BEFORE, 0), W - 1)
            value = tl.load(x_at + h * x_stride_h + w * x_stride_w, mask=known, other=0.0).to(tl.float32)
            row += value * _weight(j, rest_w, TAPS)
        found += row * _weight(i, rest_h, TAPS)
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=known)


def _supports_triton(x: torch.Tensor, *_: object) -> str | None:
    return (
        unsupported(x) if x.dim() < 5 else f"x {tuple(x.shape)} has three sizes after C, the kernel takes two"
    )


def _triton(
    x: torch.Tensor, size: Sequence[int], mode: str = "nearest", align_corners: bool = False,
    scales: Sequence[float] = (),
) -> torch.Tensor:  # fmt: skip
    _, size, steps = _settings(x, size, mode, align_corners, scales)
    out = torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    wide = lifted(x)[:, :, 0]
    launch_kernel(
        _interpolate_kernel, (cdiv(out.numel(), TILE),),
        wide, out, out.numel(), *wide.shape[1:], *padded(size, 1)[1:], *wide.stride(),
        *[0.0] * (2 - len(steps)), *steps,
        TAPS=MODES[mode], CORNERS=align_corners, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out


interpolate = define(
    "interpolate(Tensor x, int[] size, str mode='nearest', bool align_corners=False, float[] scales=[]) -> Tensor",
    fake=lambda x, size, *args, **kwargs: x.new_empty(
        (*x.shape[:2], *each("interpolate", "size", size, x.dim() - 2, 1))
    ),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, {"mode": "linear", **dims}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="interpolate",
    level=1,
    reference=reference,
    op=interpolate,
    cases=(  # the decoder of DPT's depth maps; the pyramid of Mask2Former
        _case("dpt", "model", weight=3, batch=1, channels=256, rows=96, columns=96, size=(192, 192),
              align_corners=True),
        _case("pyramid", "model", batch=1, channels=256, rows=32, columns=32, size=(64, 64), mode="nearest"),
        _case("pyramid_8", "model", batch=1, channels=256, rows=8, columns=8, size=(16, 16), mode="nearest"),
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1, size=(2, 3)),
        _case("linear", "odd", batch=2, channels=3, rows=5, columns=7, size=(11, 4)),
        _case("corners", "odd", "float32", batch=1, channels=2, rows=6, columns=5, size=(9, 13), align_corners=True),
        _case("nearest", "odd", "float16", batch=1, channels=3, rows=5, columns=7, size=(15, 10), mode="nearest"),
        _case("cubic", "odd", "float32", batch=1, channels=2, rows=6, columns=9, size=(13, 5), mode="cubic"),
        _case("scaled", "odd", "float32", batch=1, channels=2, rows=5, columns=7, size=(8, 11), scales=(1.7, 1.7)),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Scalar("size"),
        Scalar("mode", default="nearest", stated=True),
        Scalar("align_corners", default=False),
        Scalar("scales"),
    ),
    outputs=(Tensor("out", "batch channels size[0] size[1]"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "size": Axis(),
        "scales": Axis(()),
    },
    constraints=tuple(
        f"(({name}*scales[{i}])//1==size[{i}])if(scales)else(1)" for i, name in enumerate(("rows", "columns"))
    ),
    flops="8 * batch * channels * size[0] * size[1]",
)  # fmt: skip
