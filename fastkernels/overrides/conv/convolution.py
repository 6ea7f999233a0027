"""Convolution over one to three dimensions, grouped, dilated or transposed (arXiv 1603.07285)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.conv.spatial import each, lifted, padded, spatial, unsupported
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

Ints = Sequence[int]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Ints = (1,),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    groups: int = 1,
    transposed: bool = False,
    output_padding: Ints = (0,),
) -> torch.Tensor:
    """x: [B, C, ...]; weight: [N, C / groups, ...], transposed [C, N / groups, ...]; bias: [N]. Returns [B, N, ...].

    One number of stride, padding, dilation and output_padding stands for all dimensions. Padding adds zeros on both
    sides. Computed in at least float32, rounded once.
    """
    settings = _settings(x, weight, stride, padding, dilation, groups, transposed, output_padding)
    acc = torch.promote_types(x.dtype, torch.float32)
    b = None if bias is None else bias.to(acc)
    stride, padding, dilation, output_padding = settings
    y = torch.convolution(
        x.to(acc), weight.to(acc), b, stride, padding, dilation, transposed, output_padding, groups
    )
    return y.to(x.dtype)


def _settings(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints, padding: Ints, dilation: Ints, groups: int, transposed: bool,
    output_padding: Ints,
) -> list[list[int]]:  # fmt: skip
    n = spatial("convolution", x)
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if weight.dim() != x.dim() or groups < 1 or channels != x.shape[1] or weight.shape[0] % groups:
        raise ValueError(
            f"convolution: weight {tuple(weight.shape)} with {groups} groups is not for x {tuple(x.shape)}"
        )
    named = (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))
    found = [each("convolution", name, values, n, least) for name, values, least in named]
    return [*found, each("convolution", "output_padding", output_padding, n)]


def output_shape(
    x: torch.Tensor, weight: torch.Tensor, stride: Ints = (1,), padding: Ints = (0,), dilation: Ints = (1,),
    groups: int = 1, transposed: bool = False, output_padding: Ints = (0,),
) -> list[int]:  # fmt: skip
    """The shape of the result. Raises ValueError."""
    settings = _settings(x, weight, stride, padding, dilation, groups, transposed, output_padding)
    sizes = []
    for n, k, s, p, d, more in zip(x.shape[2:], weight.shape[2:], *settings, strict=True):
        wide = d * (k - 1) + 1
        sizes.append((n - 1) * s - 2 * p + wide + more if transposed else (n + 2 * p - wide) // s + 1)
    return [x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *sizes]


@triton.jit
def _convolution_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, pixels, D, H, W, OD, OH, OW, C, N,
    x_stride_b, x_stride_c, x_stride_d, x_stride_h, x_stride_w,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A product of matrices whose left one is gathered: rows are pixels of the output, columns the channels of a group
    # in each position of the window. C and N count a group's channels.
    follow(OVERLAP)
    WINDOW: tl.constexpr = KD * KH * KW
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ow, oh = rows % OW, (rows // OW) % OH
    od, image = (rows // (OW * OH)) % OD, rows // (OW * OH * OD)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, C * WINDOW, BLOCK_K):
        ks = begin + tl.arange(0, BLOCK_K)
        channel, at = ks // WINDOW, ks % WINDOW
        kd, kh, kw = at // (KH * KW), (at // KW) % KH, at % KW
        inside = (rows < pixels)[:, None] & (ks < C * WINDOW)[None, :]
        if TRANSPOSED:
            d = od[:, None] + PD - kd[None, :] * DD
            h = oh[:, None] + PH - kh[None, :] * DH
            w = ow[:, None] + PW - kw[None, :] * DW
            inside &= (d >= 0) & (h >= 0) & (w >= 0) & (d % SD == 0) & (h % SH == 0) & (w % SW == 0)
            d, h, w = d // SD, h // SH, w // SW
        else:
            d = od[:, None] * SD - PD + kd[None, :] * DD
            h = oh[:, None] * SH - PH + kh[None, :] * DH
            w = ow[:, None] * SW - PW + kw[None, :] * DW
            inside &= (d >= 0) & (h >= 0) & (w >= 0)
        inside &= (d < D) & (h < H) & (w < W)
        x_at = image[:, None] * x_stride_b + (group * C + channel)[None, :] * x_stride_c
        x = tl.load(x_ptr + x_at + d * x_stride_d + h * x_stride_h + w * x_stride_w, mask=inside, other=0.0)
        if TRANSPOSED:
            w_at = ((group * C + channel)[:, None] * N + cols[None, :]) * WINDOW + at[:, None]
        else:
            w_at = (group * N + cols)[None, :] * (C * WINDOW) + ks[:, None]
        weights = tl.load(w_ptr + w_at, mask=(ks < C * WINDOW)[:, None] & (cols < N)[None, :], other=0.0)
        acc = tl.dot(x, weights, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(b_ptr + group * N + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    size = OD * OH * OW
    plane = (image * tl.num_programs(2) + group)[:, None] * N + cols[None, :]
    out_at = plane * size + (rows % size)[:, None]
    tl.store(
        out_ptr + out_at,
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows < pixels)[:, None] & (cols < N)[None, :],
    )


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *_: object
) -> str | None:
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"weight or bias is not {x.dtype}, as x"
    return unsupported(x)


def _triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Ints = (1,), padding: Ints = (0,),
    dilation: Ints = (1,), groups: int = 1, transposed: bool = False, output_padding: Ints = (0,),
) -> torch.Tensor:  # fmt: skip
    found = _settings(x, weight, stride, padding, dilation, groups, transposed, output_padding)
    shape = output_shape(x, weight, stride, padding, dilation, groups, transposed, output_padding)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    channels, made = x.shape[1] // groups, shape[1] // groups
    wide, sizes = lifted(x), padded(shape[2:], 1)
    window = padded(weight.shape[2:], 1)
    pixels = shape[0] * math.prod(sizes)
    block_m, block_n = 64, min(64, max(16, next_power_of_2(made)))
    block_k = min(32, max(16, next_power_of_2(channels * math.prod(window))))
    steps, edges, spread = padded(found[0], 1), padded(found[1], 0), padded(found[2], 1)
    launch_kernel(
        _convolution_kernel, (cdiv(pixels, block_m), cdiv(made, block_n), groups),
        wide, weight.contiguous(), bias, out, pixels, *wide.shape[2:], *sizes, channels, made, *wide.stride(),
        **dict(zip(("KD", "KH", "KW"), window, strict=True)), **dict(zip(("SD", "SH", "SW"), steps, strict=True)),
        **dict(zip(("PD", "PH", "PW"), edges, strict=True)), **dict(zip(("DD", "DH", "DW"), spread, strict=True)),
        TRANSPOSED=transposed, HAS_BIAS=bias is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


def _torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Ints = (1,), padding: Ints = (0,),
    dilation: Ints = (1,), groups: int = 1, transposed: bool = False, output_padding: Ints = (0,),
) -> torch.Tensor:  # fmt: skip
    stride, padding, dilation, output_padding = _settings(
        x, weight, stride, padding, dilation, groups, transposed, output_padding
    )
    y = torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return y.contiguous()


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *settings: object,
    **named: object,
):
    return x.new_empty(output_shape(x, weight, *settings, **named))  # type: ignore[arg-type]


convolution = define(
    "convolution(Tensor x, Tensor weight, Tensor? bias=None, int[] stride=[1], int[] padding=[0], int[] dilation=[1],"
    " int groups=1, bool transposed=False, int[] output_padding=[0]) -> Tensor",
    fake=_fake,
    providers=(  # cuDNN first: the kernel is not measured against it yet
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_SIZE = (
    "(({name}-1)*stride[{i}]-2*padding[{i}]+dilation[{i}]*(window_{name}-1)+1+output_padding[{i}])if(transposed)else"
    "(({name}+2*padding[{i}]-dilation[{i}]*(window_{name}-1)-1)//stride[{i}]+1)"
)
_MADE = "(inner*groups)if(transposed)else(outer)"

SPEC = OpSpec(
    name="convolution",
    level=1,
    reference=reference,
    op=convolution,
    cases=(  # ResNet-50 on 32 images; ConvNeXt-L's depthwise windows; a decoder of depth maps that doubles its size
        _case("resnet_3x3", "model", weight=16, batch=32, channels=256, rows=14, columns=14, outer=256,
              inner=256, window_rows=3,
              window_columns=3, padding=(1, 1), affine=False),
        _case("resnet_stem", "model", batch=32, channels=3, rows=224, columns=224, outer=64, inner=3,
              window_rows=7,
              window_columns=7, stride=(2, 2), padding=(3, 3), affine=False),
        _case("depthwise_7x7", "model", weight=27, batch=8, channels=768, rows=14, columns=14, outer=768,
              inner=1, window_rows=7,
              window_columns=7, padding=(3, 3), groups=768),
        _case("upsample_2x", "model", batch=1, channels=256, rows=48, columns=48, outer=256, inner=256,
              window_rows=2,
              window_columns=2, stride=(2, 2), transposed=True),
        _case("mobile_3x3", "model", weight=3, batch=1, channels=96, rows=14, columns=14, outer=96, inner=1,
              window_rows=3,
              window_columns=3, padding=(1, 1), groups=96, affine=False),
        _case("mobile_1x1", "model", weight=3, batch=1, channels=96, rows=14, columns=14, outer=24, inner=96,
              window_rows=1,
              window_columns=1, affine=False),
        _case("one", "odd", "float32", batch=1, channels=1, rows=1, columns=1, outer=1, inner=1,
              window_rows=1,
              window_columns=1),
        _case("same", "odd", "float32", batch=2, channels=5, rows=9, columns=7, outer=6, inner=5,
              window_rows=3,
              window_columns=3, padding=(1, 1)),
        _case("groups", "odd", batch=1, channels=6, rows=8, columns=11, outer=9, inner=2, window_rows=3,
              window_columns=2,
              stride=(2, 3), padding=(1, 0), groups=3),
        _case("dilated", "odd", "float16", batch=1, channels=17, rows=12, columns=13, outer=19, inner=17,
              window_rows=3,
              window_columns=3, padding=(2, 2), dilation=(2, 1), affine=False),
        _case("transposed", "odd", "float32", batch=2, channels=4, rows=5, columns=3, outer=4, inner=3,
              window_rows=3,
              window_columns=4, stride=(2, 3), padding=(1, 1), groups=2, transposed=True, output_padding=(1, 0)),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Tensor("weight", "outer inner window_rows window_columns", std=0.2),
        Tensor("bias", _MADE, when="affine"),
        Scalar("stride"),
        Scalar("padding"),
        Scalar("dilation"),
        Scalar("groups", default=1),
        Scalar("transposed", default=False),
        Scalar("output_padding"),
    ),
    outputs=(
        Tensor("out", f"batch {_MADE} {_SIZE.format(i=0, name='rows')} {_SIZE.format(i=1, name='columns')}"),
    ),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "outer": Axis(),
        "inner": Axis(),
        "window_rows": Axis(),
        "window_columns": Axis(),
        "affine": Axis.option(True, stated=True),
        "stride": Axis((1, 1)),
        "padding": Axis((0, 0)),
        "dilation": Axis((1, 1)),
        "output_padding": Axis((0, 0)),
    },
    constraints=("(outer if transposed else inner * groups) == channels",),
    mixed=True,
    flops="2 * batch * outer * inner * window_rows * window_columns * "
    f"(rows * columns if transposed else ({_SIZE.format(i=0, name='rows')}) * ({_SIZE.format(i=1, name='columns')}))",
)  # fmt: skip
