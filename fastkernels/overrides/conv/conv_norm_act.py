"""Convolution, batch norm with stored statistics, activation and residual as one op: the layer of CNNs.

y = activation(norm(conv(x) + bias)) + residual, as MobileNetV4's and EfficientNetV2's blocks have it (arXiv 2404.10518,
2104.00298), or activation(norm(conv(x) + bias) + residual), as ResNet's (arXiv 1512.03385). Models that fold the norm
into weight and bias give no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.assemble import filled, load, make, refuse, takes
from fastkernels.core.case import Tolerance
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.runtime import ahead
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.conv.convolution import output_shape
from fastkernels.overrides.conv.epilogue import (
    CODES,
    Norm,
    Vectors,
    activate,
    apply_epilogue,
    check_activation,
    check_norm,
    finished,
    normalize,
    normalized,
)
from fastkernels.overrides.conv.spatial import channels_last, each, unsupported
from fastkernels.overrides.conv.timm_activations import act_of
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import unsupported_vector

Ints = Sequence[int]
T = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
LARGEST = 1 << 31  # numbers of x: rows are counted with 32 bits


def reference(
    x: T,
    weight: T,
    bias: T | None = None,
    mean: T | None = None,
    var: T | None = None,
    norm_weight: T | None = None,
    norm_bias: T | None = None,
    residual: T | None = None,
    stride: Ints = (1,),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    groups: int = 1,
    activation: str = "none",
    eps: float = 1e-5,
    add_first: bool = False,
) -> T:
    """x: [B, C, H, W]; weight: [N, C / groups, KH, KW]; residual: [B, N, OH, OW] or None; the others: [N] or None.

    mean and var are the norm's statistics; without them there is no norm. One number of stride, padding and dilation
    stands for both dimensions. add_first: the residual is added before the activation. Returns [B, N, OH, OW] in x's
    dtype, computed in at least float32, rounded once.
    """
    vectors = mean, var, norm_weight, norm_bias
    _check(x, weight, bias, vectors, residual, stride, padding, dilation, groups, activation)
    acc = torch.promote_types(x.dtype, torch.float32)
    b = None if bias is None else bias.to(acc)
    y = torch.conv2d(x.to(acc), weight.to(acc), b, list(stride), list(padding), list(dilation), groups)
    y = normalized(y, vectors, eps)
    return finished(y, activation, None if residual is None else residual.to(acc), add_first).to(x.dtype)


def _check(
    x: T, weight: T, bias: T | None, vectors: Vectors, residual: T | None, stride: Ints, padding: Ints, dilation: Ints,
    groups: int, activation: str,
) -> list[int]:  # fmt: skip
    """The shape of the result. Raises ValueError."""
    if x.dim() != 4:
        raise ValueError(f"conv_norm_act: x must be [B, C, H, W], got {tuple(x.shape)}")
    check_activation("conv_norm_act", activation)
    shape = output_shape(x, weight, stride, padding, dilation, groups)
    if min(shape[2:]) < 1:
        raise ValueError(
            f"conv_norm_act: x {tuple(x.shape)} is smaller than the window of {tuple(weight.shape)}"
        )
    check_norm("conv_norm_act", shape[1], vectors)
    if bias is not None and bias.shape != (shape[1],):
        raise ValueError(f"conv_norm_act: bias must be [{shape[1]}], got {tuple(bias.shape)}")
    if residual is not None and list(residual.shape) != shape:
        raise ValueError(
            f"conv_norm_act: residual {tuple(residual.shape)} is not {tuple(shape)}, as the result"
        )
    return shape


def _format(x: T, weight: T) -> torch.memory_format:
    """Of the result: channels last if x or the weight has them last, as in PyTorch's convolutions."""
    return torch.channels_last if channels_last(x) or channels_last(weight) else torch.contiguous_format


def _empty(x: T, weight: T, shape: Sequence[int]) -> T:
    """Memory for the result."""
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device, memory_format=_format(x, weight))


@triton.jit(do_not_specialize=["pixels", "H", "W", "OH", "OW"])
def _depthwise_kernel(
    x_ptr, k_ptr, bias_ptr, mean_ptr, var_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, pixels, C, H, W, OH, OW,
    x_stride_b, x_stride_c, x_stride_h, x_stride_w, k_stride_c, k_stride_h, k_stride_w, out_stride_b, out_stride_c,
    out_stride_h, out_stride_w, res_stride_b, res_stride_c, res_stride_h, res_stride_w, eps,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_FIRST: tl.constexpr, CODE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program computes BLOCK_P pixels of BLOCK_C channels. The windows of neighbors overlap: cached loads.
    follow(OVERLAP)
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    ow, oh, image = rows % OW, (rows // OW) % OH, (rows // (OW * OH)).to(tl.int64)
    inside_c, at_c = cols < C, cols.to(tl.int64)
    x_at = x_ptr + image[:, None] * x_stride_b + at_c[None, :] * x_stride_c
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for kh in range(KH):  # unrolled, 49 positions take long to compile
        h = oh * SH - PH + kh * DH
        inside_h = (rows < pixels) & (h >= 0) & (h < H)
        for kw in tl.static_range(KW):
            w = ow * SW - PW + kw * DW
            inside = (inside_h & (w >= 0) & (w < W))[:, None] & inside_c[None, :]
            x = tl.load(x_at + (h * x_stride_h + w * x_stride_w)[:, None], mask=inside, other=0.0)
            k_at = k_ptr + at_c * k_stride_c + kh * k_stride_h + kw * k_stride_w
            k = tl.load(k_at, mask=inside_c, other=0.0)
            acc += x.to(tl.float32) * k.to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=inside_c, other=0.0).to(tl.float32)[None, :]
    if HAS_NORM:
        acc = normalize(
            acc, cols[None, :], inside_c[None, :], mean_ptr, var_ptr, w_ptr, b_ptr, eps, HAS_W, HAS_B
        )
    known = (rows < pixels)[:, None] & inside_c[None, :]
    if not ADD_FIRST:
        acc = activate(acc, CODE)
    if HAS_RESIDUAL:
        pixel = image * res_stride_b + oh * res_stride_h + ow * res_stride_w
        at = residual_ptr + pixel[:, None] + at_c[None, :] * res_stride_c
        acc += tl.load(at, mask=known, other=0.0).to(tl.float32)
    if ADD_FIRST:
        acc = activate(acc, CODE)
    pixel = image * out_stride_b + oh * out_stride_h + ow * out_stride_w
    tl.store(
        out_ptr + pixel[:, None] + at_c[None, :] * out_stride_c, acc.to(out_ptr.dtype.element_ty), mask=known
    )


@triton.jit(do_not_specialize=["pixels", "H", "W", "OH", "OW"])
def _dense_kernel(
    x_ptr, k_ptr, bias_ptr, mean_ptr, var_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, pixels, C, N, H, W, OH, OW,
    x_stride_b, x_stride_c, x_stride_h, x_stride_w, k_stride_n, k_stride_c, k_stride_h, k_stride_w, out_stride_b,
    out_stride_c, out_stride_h, out_stride_w, res_stride_b, res_stride_c, res_stride_h, res_stride_w, eps,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_FIRST: tl.constexpr, CODE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A product whose left matrix is gathered: rows are pixels of the result, columns blocks of a position's channels.
    follow(OVERLAP)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ow, oh, image = rows % OW, (rows // OW) % OH, (rows // (OW * OH)).to(tl.int64)
    inside_n, at_n = cols < N, cols.to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, KH * KW * blocks):
        place, ks = step // blocks, (step % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
        kh, kw = place // KW, place % KW
        h, w = oh * SH - PH + kh * DH, ow * SW - PW + kw * DW
        inside = (rows < pixels) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        pixel = image * x_stride_b + h * x_stride_h + w * x_stride_w
        x_at = x_ptr + pixel[:, None] + ks.to(tl.int64)[None, :] * x_stride_c
        x = tl.load(x_at, mask=inside[:, None] & (ks < C)[None, :], other=0.0)
        k_at = k_ptr + at_n[None, :] * k_stride_n + kh * k_stride_h + kw * k_stride_w
        k = tl.load(k_at + ks[:, None] * k_stride_c, mask=(ks < C)[:, None] & inside_n[None, :], other=0.0)
        acc = tl.dot(x, k, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if HAS_NORM:
        acc = normalize(
            acc, cols[None, :], inside_n[None, :], mean_ptr, var_ptr, w_ptr, b_ptr, eps, HAS_W, HAS_B
        )
    known = (rows < pixels)[:, None] & inside_n[None, :]
    if not ADD_FIRST:
        acc = activate(acc, CODE)
    if HAS_RESIDUAL:
        pixel = image * res_stride_b + oh * res_stride_h + ow * res_stride_w
        at = residual_ptr + pixel[:, None] + at_n[None, :] * res_stride_c
        acc += tl.load(at, mask=known, other=0.0).to(tl.float32)
    if ADD_FIRST:
        acc = activate(acc, CODE)
    pixel = image * out_stride_b + oh * out_stride_h + ow * out_stride_w
    tl.store(
        out_ptr + pixel[:, None] + at_n[None, :] * out_stride_c, acc.to(out_ptr.dtype.element_ty), mask=known
    )


def _supports_triton(
    x: T, weight: T, bias: T | None = None, mean: T | None = None, var: T | None = None,
    norm_weight: T | None = None, norm_bias: T | None = None, residual: T | None = None, *_: object,
) -> str | None:  # fmt: skip
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias, residual)):
        return f"weight, bias or residual is not {x.dtype}, as x"
    if x.numel() >= LARGEST:
        return f"x has {x.numel()} numbers: at most {LARGEST - 1}"
    norm = Norm(mean, var, norm_weight, norm_bias, 0.0)
    return unsupported(x) or unsupported_vector(bias, "bias") or norm.unsupported()


def _is_pointwise(weight: T, padding: Ints, groups: int) -> bool:
    return groups == 1 and weight.shape[2:] == (1, 1) and not any(padding)


def _tile(pixels: int, made: int, channels: int, x: T) -> tuple[int, int, int, int]:
    """Rows, columns and depth of a program's part of a product, and its warps: smaller ones for few pixels."""
    m, n = 64 if pixels < 1 << 14 else 128, min(128, max(16, next_power_of_2(made)))
    while cdiv(pixels, m) * cdiv(made, n) < multiprocessors(x.device) and m * n > 512:
        if n >= m:
            n //= 2
        else:
            m //= 2
    deep = 32 if x.dtype == torch.float32 else 64 if m * n > 4096 else 128
    k = min(deep, max(16, next_power_of_2(channels)))
    return m, n, k, 2 if m * n <= 1024 else 4 if m <= 64 else 8


def _triton(
    x: T, weight: T, bias: T | None = None, mean: T | None = None, var: T | None = None,
    norm_weight: T | None = None, norm_bias: T | None = None, residual: T | None = None, stride: Ints = (1,),
    padding: Ints = (0,), dilation: Ints = (1,), groups: int = 1, activation: str = "none", eps: float = 1e-5,
    add_first: bool = False,
) -> T:  # fmt: skip
    """One kernel of depthwise and pointwise convolutions; others are PyTorch's (cuDNN's), with a second kernel."""
    norm = Norm(mean, var, norm_weight, norm_bias, eps)
    shape = _check(x, weight, bias, norm.vectors, residual, stride, padding, dilation, groups, activation)
    (batch, channels, h, w), (_, made, rows, columns) = x.shape, shape
    pixels, depthwise = batch * rows * columns, groups == channels == made and channels > 1
    if not depthwise and not _is_pointwise(weight, padding, groups):
        moves = list(stride), list(padding), list(dilation), groups
        return _by_library(x, weight, bias, norm, residual, moves, activation, add_first, shape)
    out = _empty(x, weight, shape)
    if out.numel() == 0:
        return out
    strides = (*out.stride(), *(out if residual is None else residual).stride(), eps)
    steps, edges, spread = (each("conv_norm_act", "", values, 2) for values in (stride, padding, dilation))
    constants = {
        "KH": weight.shape[2], "KW": weight.shape[3], "SH": steps[0], "SW": steps[1], "PH": edges[0], "PW": edges[1],
        "DH": spread[0], "DW": spread[1], "HAS_BIAS": bias is not None, "HAS_NORM": mean is not None,
        **norm.constants(), "HAS_RESIDUAL": residual is not None, "ADD_FIRST": add_first, "CODE": CODES[activation],
    }  # fmt: skip
    tensors = (x, weight, bias, *norm.vectors, residual, out, pixels)
    if depthwise:
        block_c = min(64, next_power_of_2(channels))
        block_p = min(max(1, 2048 // block_c), next_power_of_2(pixels))
        while block_p > 4 and cdiv(pixels, block_p) * cdiv(channels, block_c) < 2 * multiprocessors(x.device):
            block_p //= 2
        launch_kernel(
            _depthwise_kernel, (cdiv(pixels, block_p), cdiv(channels, block_c)),
            *tensors, channels, h, w, rows, columns, *x.stride(), weight.stride(0), *weight.stride()[2:], *strides,
            **constants, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4, any_grid=False,
        )  # fmt: skip
        return out
    block_m, block_n, block_k, warps = _tile(pixels, made, channels, x)
    allowed = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    exact = x.dtype == torch.float32 and not (x.is_cuda and allowed == "tf32")
    launch_kernel(
        _dense_kernel, (cdiv(pixels, block_m), cdiv(made, block_n)),
        *tensors, channels, made, h, w, rows, columns, *x.stride(), *weight.stride(), *strides,
        **constants, PRECISION="ieee" if exact else "tf32", BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=3, any_grid=False,
    )  # fmt: skip
    return out


def _by_library(
    x: T, weight: T, bias: T | None, norm: Norm, residual: T | None,
    moves: tuple[list[int], list[int], list[int], int], activation: str, add_first: bool, shape: list[int],
) -> T:  # fmt: skip
    """PyTorch's (cuDNN's) convolution, and one kernel for all that follows, in the convolution's own memory."""
    if ahead.only():  # cuDNN times its algorithms later, next to no threads that compile
        y = _empty(x, weight, shape)
    else:
        y = torch.conv2d(x, weight, None, *moves).contiguous(memory_format=_format(x, weight))
    if bias is None and norm.mean is None and residual is None and activation == "none":
        return y
    return apply_epilogue(y, norm, activation, residual, y, add_first, bias)


def _library(
    x: T, weight: T, bias: T | None = None, mean: T | None = None, var: T | None = None,
    norm_weight: T | None = None, norm_bias: T | None = None, residual: T | None = None, stride: Ints = (1,),
    padding: Ints = (0,), dilation: Ints = (1,), groups: int = 1, activation: str = "none", eps: float = 1e-5,
    add_first: bool = False,
) -> T:  # fmt: skip
    """The product of cuBLAS or the convolution of cuDNN, with what it can add itself; then at most one kernel."""
    norm = Norm(mean, var, norm_weight, norm_bias, eps)
    shape = _check(x, weight, bias, norm.vectors, residual, stride, padding, dilation, groups, activation)
    moves = list(stride), list(padding), list(dilation), groups
    if ahead.only():
        return _by_library(x, weight, bias, norm, residual, moves, activation, add_first, shape)
    by_pixel = channels_last(x) or x.shape[2:] == (1, 1)
    if by_pixel and _is_pointwise(weight, padding, groups) and set(stride) == {1} and 0 not in shape:
        return _product(x, weight, bias, norm, residual, activation, add_first, shape)
    if fuses_relu(x, weight, bias, mean, residual, activation, add_first):
        steps, edges, spread = (
            each("conv_norm_act", "", values, 2) for values in (stride, padding, dilation)
        )
        if residual is None:
            return torch.cudnn_convolution_relu(x, weight, bias, steps, edges, spread, groups)
        added = residual.contiguous(memory_format=torch.channels_last)
        return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, steps, edges, spread, groups)
    return _by_library(x, weight, bias, norm, residual, moves, activation, add_first, shape)


def fuses_relu(
    x: T, weight: T, bias: T | None, mean: T | None, residual: T | None, activation: str, add_first: bool
) -> bool:
    """Whether cuDNN computes convolution, bias, residual and ReLU in one kernel."""
    fits = activation == "relu" and mean is None and bias is not None and (residual is None or add_first)
    return fits and x.is_cuda and x.dtype in HALVES and channels_last(x) and channels_last(weight)


def _product(
    x: T,
    weight: T,
    bias: T | None,
    norm: Norm,
    residual: T | None,
    activation: str,
    add_first: bool,
    shape: list[int],
) -> T:
    """A convolution of single pixels as a product of cuBLAS, which adds bias, residual or ReLU where it can."""
    (batch, made, rows, columns), w = shape, weight.flatten(1)

    def flat(t: T) -> T:
        return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])

    def image(t: T) -> T:
        return t.view(batch, rows, columns, made).permute(0, 3, 1, 2)

    given, plain = flat(x), norm.mean is None
    if plain and activation == "none" and residual is not None:
        return image(linear_residual(flat(residual), given, w, bias))
    if plain and activation == "relu" and bias is not None and residual is None and x.dtype in HALVES:
        return image(torch._addmm_activation(bias, given, w.t()))
    left = activation != "none" or not plain or residual is not None
    y = image(torch.nn.functional.linear(given, w, None if left else bias))
    if not left:
        return y
    return apply_epilogue(y, norm, activation, residual, y, add_first, bias)


def _torch(
    x: T, weight: T, bias: T | None = None, mean: T | None = None, var: T | None = None,
    norm_weight: T | None = None, norm_bias: T | None = None, residual: T | None = None, stride: Ints = (1,),
    padding: Ints = (0,), dilation: Ints = (1,), groups: int = 1, activation: str = "none", eps: float = 1e-5,
    add_first: bool = False,
) -> T:  # fmt: skip
    norm = Norm(mean, var, norm_weight, norm_bias, eps)
    shape = _check(x, weight, bias, norm.vectors, residual, stride, padding, dilation, groups, activation)
    y = torch.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    return _empty(x, weight, shape).copy_(finished(norm.by_torch(y), activation, residual, add_first))


def _reference(x: T, weight: T, *rest: object) -> T:
    y = reference(x, weight, *rest)  # type: ignore[arg-type]
    return _empty(x, weight, y.shape).copy_(y)


def _fake(
    x: T, weight: T, bias: T | None = None, mean: T | None = None, var: T | None = None,
    norm_weight: T | None = None, norm_bias: T | None = None, residual: T | None = None, stride: Ints = (1,),
    padding: Ints = (0,), dilation: Ints = (1,), groups: int = 1, activation: str = "none", eps: float = 1e-5,
    add_first: bool = False,
) -> T:  # fmt: skip
    return _empty(x, weight, output_shape(x, weight, stride, padding, dilation, groups))


conv_norm_act = define(
    "conv_norm_act(Tensor x, Tensor weight, Tensor? bias=None, Tensor? mean=None, Tensor? var=None, Tensor?"
    " norm_weight=None, Tensor? norm_bias=None, Tensor? residual=None, int[] stride=[1], int[] padding=[0], int[]"
    ' dilation=[1], int groups=1, str activation="none", float eps=1e-5, bool add_first=False) -> Tensor',
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("library", _library),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    (
        x,
        weight,
        bias,
        mean,
        var,
        norm_weight,
        norm_bias,
        residual,
        stride,
        padding,
        dilation,
        groups,
        activation,
        eps,
        _,
    ) = filled(args, 15, *(None,) * 6, (1,), (0,), (1,), 1, "none", 1e-5, False)
    ultralytics = takes(cls, "c1")
    if not ultralytics and not takes(cls, "norm_kwargs"):
        raise ValueError(f"{cls.__name__} is a block, not one convolution with a norm")
    refuse(cls, residual=residual)
    values = [set(v) for v in (weight.shape[2:], stride, padding, dilation)]
    if mean is None or any(len(v) > 1 for v in values):
        raise ValueError(f"{cls.__name__} has a norm, and one number for both dimensions")
    kernel, step, edge, spread = (v.pop() for v in values)
    if ultralytics:
        module = _ultralytics(cls, x, len(weight), kernel, step, edge, spread, groups, activation, eps)
    else:
        module = make(
            cls, x, x.shape[1], len(weight), kernel, step, edge, spread, groups, bias is not None,
            act_layer=_named(activation), norm_kwargs={"eps": eps},
        )  # fmt: skip
    norm = {"running_mean": mean, "running_var": var, "weight": norm_weight, "bias": norm_bias}
    load(module, {"conv.weight": weight, "conv.bias": bias, **{f"bn.{name}": t for name, t in norm.items()}})
    module.eval()
    return lambda: module(x)


def _ultralytics(cls: type, x: T, outer: int, kernel: int, step: int, edge: int, spread: int, groups: int,
                 activation: str, eps: float) -> Any:  # fmt: skip
    """ultralytics' Conv, or its DWConv, which finds its padding and its groups from the other sizes."""
    given = {"p": edge, "g": groups} if takes(cls, "g") else {}
    module = make(cls, x, x.shape[1], outer, kernel, step, d=spread, act=act_of(_named(activation)), **given)
    made = module.conv.groups, module.conv.padding, module.bn.eps
    if made != (groups, (edge, edge), eps):
        raise ValueError(
            f"{cls.__name__} has groups={made[0]}, padding={made[1]} and eps={made[2]} for these sizes"
        )
    return module


def _named(activation: str) -> str | None:
    return None if activation == "none" else activation


def _case(name: str, tag: str, sizes: tuple[int, ...], window: int | tuple[int, int] = 1, dtype: str = "bfloat16",
          weight: float = 1, **dims: object) -> Case:  # fmt: skip
    names = ("batch", "channels", "rows", "columns", "outer", "inner")
    rows, columns = (window, window) if isinstance(window, int) else window
    made = dict(zip(names, sizes, strict=True), window_rows=rows, window_columns=columns, **dims)
    return Case(name, made, dtype, weight, (tag,))


_SIZE = "({name}+2*padding[{i}]-dilation[{i}]*(window_{name}-1)-1)//stride[{i}]+1"
_OUT = f"batch outer {_SIZE.format(i=0, name='rows')} {_SIZE.format(i=1, name='columns')}"

SPEC = OpSpec(
    name="conv_norm_act",
    level=2,
    reference=reference,
    op=conv_norm_act,
    cases=(  # MobileNetV4 conv medium at 256 px, EfficientNetV2 rw_m at 320 px, ConvNeXtV2 base at 384 px
        _case("mobile_dw5", "model", (32, 160, 16, 16, 160, 1), 5, weight=6, padding=(2, 2), groups=160, norm=True),
        _case("mobile_expand", "model", (32, 160, 16, 16, 640, 160), weight=8, norm=True, activation="relu"),
        _case("mobile_project", "model", (32, 640, 16, 16, 160, 640), weight=8, norm=True, residual=True),
        _case("mobile_expand_1", "model", (1, 160, 16, 16, 640, 160), weight=8, norm=True, activation="relu"),
        _case("efficient_dw3", "model", (8, 1152, 20, 20, 1152, 1), 3, weight=18, padding=(1, 1), groups=1152,
              norm=True, activation="silu"),
        _case("efficient_edge", "model", (8, 56, 80, 80, 224, 56), 3, weight=4, padding=(1, 1), norm=True,
              activation="silu"),
        _case("convnext_dw7", "model", (8, 512, 24, 24, 512, 1), 7, weight=27, padding=(3, 3), groups=512, affine=True),
        _case("resnet_project", "model", (4, 256, 40, 40, 1024, 256), weight=22, norm=True, residual=True,
              activation="relu", add_first=True),
        _case("one", "odd", (1, 1, 1, 1, 1, 1), dtype="float32"),
        _case("add_first", "odd", (2, 17, 5, 7, 17, 1), 3, padding=(1, 1), groups=17, norm=True, activation="silu",
              dtype="float32", residual=True, add_first=True),
        _case("add_first_3", "odd", (1, 6, 5, 7, 9, 6), 3, padding=(1, 1), norm=True, activation="relu",
              dtype="float32", residual=True, add_first=True),
        _case("add_first_1", "odd", (1, 19, 6, 5, 20, 19), dtype="float16", affine=True, activation="relu",
              residual=True, add_first=True),
        _case("pointwise_63", "odd", (2, 17, 9, 7, 33, 17), dtype="float32", norm=True, activation="relu"),
        _case("stride_2", "odd", (1, 19, 6, 5, 20, 19), dtype="float16", stride=(2, 2), affine=True, residual=True),
        _case("depthwise_3", "odd", (2, 17, 5, 7, 17, 1), 3, padding=(1, 1), groups=17, norm=True, activation="silu",
              dtype="float32", residual=True),
        _case("depthwise_5", "odd", (1, 9, 7, 6, 9, 1), 5, padding=(2, 2), stride=(2, 2), groups=9, affine=True),
        _case("depthwise_wide", "odd", (1, 70, 4, 3, 70, 1), (3, 2), dtype="float16", padding=(2, 1), dilation=(2, 1),
              groups=70, activation="hard_swish"),
        _case("dense_3", "odd", (2, 5, 6, 7, 6, 5), 3, padding=(1, 1), stride=(2, 1), norm=True, activation="relu6",
              residual=True),
        _case("groups", "odd", (1, 6, 5, 8, 9, 2), (3, 2), dtype="float32", groups=3, affine=True, activation="gelu"),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns"),
        Tensor("weight", "outer inner window_rows window_columns", values=fan_in),
        Tensor("bias", "outer", when="affine", std=0.1),
        Tensor("mean", "outer", when="norm", std=0.5),
        Tensor("var", "outer", when="norm",
               values=lambda call, shape, dtype: call.rand(*shape).add(0.5).to(dtype)),
        Tensor("norm_weight", "outer", when="norm", mean=1, std=0.1),
        Tensor("norm_bias", "outer", when="norm", std=0.1),
        Tensor("residual", _OUT, when="residual"),
        Scalar("stride"),
        Scalar("padding"),
        Scalar("dilation"),
        Scalar("groups", default=1),
        Scalar("activation"),
        Scalar("eps", default=1e-5),
        Scalar("add_first", default=False),
    ),
    outputs=(Tensor("out", _OUT),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "outer": Axis(),
        "inner": Axis(),
        "window_rows": Axis(),
        "window_columns": Axis(),
        "stride": Axis((1, 1)),
        "padding": Axis((0, 0)),
        "dilation": Axis((1, 1)),
        "activation": Axis.option("none"),
    },
    build=_build,
    constraints=("inner * groups == channels",),
    mixed=True,
    flops="2 * batch * outer * inner * window_rows * window_columns"
    f" * ({_SIZE.format(i=0, name='rows')}) * ({_SIZE.format(i=1, name='columns')})",
    activations=("x",),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
    stands_for=("convolution", "batch_norm"),
)  # fmt: skip
