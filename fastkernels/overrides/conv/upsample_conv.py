"""Nearest upsampling to twice the size, then a 3x3 convolution, as four 2x2 convolutions of the small image.

Upsampled pixels are equal in blocks of 2x2. At each of the four places (phases) in a block, a window sees 2x2 pixels of
the small image, with sums of the 3x3 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.assemble import filled, load, make
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Tensor
from fastkernels.overrides.conv.spatial import channels_last
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, unsupported_vector

TILE = 4096  # elements of a program


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [B, C, H, W]; weight: [O, C, 3, 3]; bias: [O] or None. Returns [B, O, 2H, 2W] in x's dtype.

    Computed in at least float32, rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    wide = F.interpolate(x.to(acc), scale_factor=2.0, mode="nearest")
    b = None if bias is None else bias.to(acc)
    return F.conv2d(wide, weight.to(acc), b, padding=1).to(x.dtype)


@triton.jit
def _upsample_conv_phases_kernel(
    w_ptr, out_ptr, made, C, stride_o, stride_c, stride_h, stride_w,
    BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per output channel and block of input channels: the 2x2 weights of all four phases.
    follow(OVERLAP)
    o = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    at = tl.arange(0, 16)[:, None]
    i, j, r, s = at // 8, at // 4 % 2, at // 2 % 2, at % 2  # the phase, and the place in its window
    # Of the rows of the 3x3 window, phase 0 sees (0), (1, 2) as one row each, phase 1 (0, 1), (2); so for columns.
    row, column = r * (1 + i), s * (1 + j)
    total = tl.zeros([16, BLOCK_C], tl.float32)
    for a in tl.static_range(2):
        for b in tl.static_range(2):
            seen = ((a == 0) | (i != r)) & ((b == 0) | (j != s)) & (c < C)
            w_at = w_ptr + o * stride_o + c * stride_c + (row + a) * stride_h + (column + b) * stride_w
            total += tl.load(w_at, mask=seen, other=0.0).to(tl.float32)
    out_at = out_ptr + ((i * 2 + j) * made + o) * 4 * C + (r * 2 + s) * C + c
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _upsample_conv_kernel(
    x_ptr, b_ptr, out_ptr, made, H, W, stride_b, stride_c, stride_h, stride_w, out_b, out_c, out_h, out_w,
    HAS_B: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per row of the result [.., H, W], block of columns, and block of channels. Phase (i, j) of pixel
    # (y, x) of the small image is at (y + i, x + j).
    follow(OVERLAP)
    image, row = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    known = (columns < W) & (channels < made)
    x_at = x_ptr + image * stride_b + (row + 1) // 2 * stride_h + row % 2 * 2 * made * stride_c
    x_at += (columns + 1) // 2 * stride_w + columns % 2 * made * stride_c
    y = tl.load(x_at + channels * stride_c, mask=known, other=0.0).to(tl.float32)
    if HAS_B:
        y += tl.load(b_ptr + channels, mask=channels < made, other=0.0).to(tl.float32)
    out_at = out_ptr + image * out_b + row * out_h + columns * out_w + channels * out_c
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=known)


def _empty(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Memory for the result, with channels last if x or the weight has them last, as in PyTorch's convolutions."""
    last = channels_last(x) or channels_last(weight)
    batch, _, h, w = x.shape
    return torch.empty(
        (batch, weight.shape[0], 2 * h, 2 * w), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )  # fmt: skip


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dim() != 4 or weight.dim() != 4 or tuple(weight.shape[1:]) != (x.shape[1], 3, 3):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"upsample_conv: x must be [B, C, H, W] and weight [O, C, 3, 3], got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"upsample_conv: bias {tuple(bias.shape)} is not for weight {tuple(weight.shape)}")


def _supports_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        return f"x is {x.dtype}, weight {weight.dtype}: not both float16, bfloat16 or float32"
    return unsupported_vector(bias, "bias")


def phases(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of the four phases [4 * O, C, 2, 2], channels last: sums of weight [O, C, 3, 3] in float32."""
    made, channels = weight.shape[:2]
    out = torch.empty(4 * made, 2, 2, channels, dtype=weight.dtype, device=weight.device)
    block = min(next_power_of_2(channels), TILE // 16)
    launch_kernel(
        _upsample_conv_phases_kernel, (made, cdiv(channels, block)), weight, out, made, channels, *weight.stride(),
        BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    out = _empty(x, weight)
    if out.numel() == 0:
        return out
    # Each call makes the sums. A stored copy (16/9 of the weight) would be wrong once an adapter is merged into the
    # weight in place: the replay of a CUDA graph runs no code that could notice.
    wide = F.conv2d(x.contiguous(memory_format=torch.channels_last), phases(weight), padding=1)
    batch, made, rows, columns = out.shape
    most = 256 if channels_last(out) else 64  # channels, or columns too, are neighbors in the result
    block_c = min(next_power_of_2(made), most)
    block_p = min(TILE // block_c, next_power_of_2(columns))
    launch_kernel(
        _upsample_conv_kernel, (batch * rows, cdiv(columns, block_p), cdiv(made, block_c)),
        wide, bias, out, made, rows, columns, *wide.stride(), *out.stride(),
        HAS_B=bias is not None, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    _check(x, weight, bias)
    return _empty(x, weight).copy_(reference(x, weight, bias))


upsample_conv = define(
    "upsample_conv(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    fake=lambda x, weight, bias=None: _empty(x, weight),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, sizes: tuple[int, ...], dtype: str = "bfloat16", weight: float = 1,
          affine: bool = True) -> Case:  # fmt: skip
    dims = dict(zip(("batch", "channels", "rows", "columns", "outer"), sizes, strict=True), affine=affine)
    return Case(name, dims, dtype, weight, (tag,))


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias = filled(args, 3, None)
    module = make(cls, x, x.shape[1], use_conv=True, out_channels=len(weight), bias=bias is not None)
    load(module, {"conv.weight": weight, "conv.bias": bias})
    return lambda: module(x)


SPEC = OpSpec(
    name="upsample_conv",
    level=2,
    reference=reference,
    op=upsample_conv,
    cases=(  # SDXL at 1024 px: the UNet on an image and its unconditional twin in 30 steps; the decoder of its VAE
        _case("unet_32", "model", (2, 1280, 32, 32, 1280), weight=30),
        _case("unet_64", "model", (2, 640, 64, 64, 640), weight=30),
        _case("vae_128", "model", (1, 512, 128, 128, 512)),
        _case("vae_256", "model", (1, 512, 256, 256, 512)),
        _case("vae_512", "model", (1, 256, 512, 512, 256)),
        _case("one", "odd", (1, 1, 1, 1, 1), "float32"),
        _case("odd_63", "odd", (2, 15, 9, 7, 17)),
        _case("odd_half", "odd", (1, 33, 5, 6, 40), "float16"),
        _case("plain", "odd", (2, 6, 3, 11, 5), "float32", affine=False),
        _case("wide", "odd", (1, 8, 2, 3, 300), "float32"),
        _case("row", "odd", (3, 4, 1, 70, 3)),
        _case("column", "odd", (1, 260, 5, 1, 2), "float16"),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Tensor("weight", "outer channels 3 3", std=0.1),
        Tensor("bias", "outer", when="affine"),
    ),
    outputs=(Tensor("out", "batch outer 2*rows 2*columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "outer": Axis.width(),
        "affine": Axis.option(True, stated=True),
    },
    build=_build,
    mixed=True,
    flops="32 * batch * outer * channels * rows * columns",
)
