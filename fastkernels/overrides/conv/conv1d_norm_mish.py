"""Convolution over time, group norm and Mish, with FiLM and a residual: the block of diffusion policies' UNets.

y = mish(group_norm(conv1d(x) + bias)) * scale + shift + residual, as in arXiv 2303.04137 and 2403.03954. The scale and
shift of each channel are FiLM, arXiv 1709.07871.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core import assemble
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
TILE = 16384  # elements of a group of channels that a program can hold


def reference(
    x: T,
    weight: T,
    bias: T | None,
    norm_weight: T,
    norm_bias: T,
    num_groups: int,
    eps: float = 1e-5,
    scale: T | None = None,
    shift: T | None = None,
    residual: T | None = None,
) -> T:
    """x: [B, C, L]; weight: [N, C, K] with an odd K; bias, norm_weight, norm_bias: [N]; bias may be None.

    scale and shift, both or neither: [B, N]; residual: [B, N, L] or None. L stays: K // 2 zeros are on both sides.
    Computed in at least float32, rounded once; returns [B, N, L] in x's dtype.
    """
    _check(x, weight, bias, norm_weight, norm_bias, num_groups, scale, shift, residual)
    acc = torch.promote_types(x.dtype, torch.float32)
    b = None if bias is None else bias.to(acc)
    y = F.conv1d(x.to(acc), weight.to(acc), b, padding=weight.shape[2] // 2)
    groups = y.reshape(len(x), num_groups, -1)
    groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(y.shape)
    y = F.mish(y * norm_weight.to(acc)[:, None] + norm_bias.to(acc)[:, None])
    if scale is not None and shift is not None:
        y = y * scale.to(acc)[:, :, None] + shift.to(acc)[:, :, None]
    return (y if residual is None else y + residual.to(acc)).to(x.dtype)


def _check(
    x: T, weight: T, bias: T | None, norm_weight: T, norm_bias: T, num_groups: int, scale: T | None, shift: T | None,
    residual: T | None,
) -> None:  # fmt: skip
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[1] != x.shape[1] or weight.shape[2] % 2 == 0:
        raise ValueError(
            f"conv1d_norm_mish: x must be [B, C, L] and weight [N, C, K] with an odd K, got {tuple(x.shape)} and"
            f" {tuple(weight.shape)}"
        )
    made = weight.shape[0]
    if num_groups < 1 or made % num_groups:
        raise ValueError(f"conv1d_norm_mish: {made} channels cannot be divided into {num_groups} groups")
    for name, t in (("bias", bias), ("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if t is not None and t.shape != (made,):
            raise ValueError(f"conv1d_norm_mish: {name} must be [{made}], got {tuple(t.shape)}")
    if (scale is None) != (shift is None):
        raise ValueError("conv1d_norm_mish: give scale and shift, or neither")
    for name, t in (("scale", scale), ("shift", shift)):
        if t is not None and t.shape != (len(x), made):
            raise ValueError(f"conv1d_norm_mish: {name} must be {[len(x), made]}, got {tuple(t.shape)}")
    if residual is not None and residual.shape != (len(x), made, x.shape[2]):
        raise ValueError(
            f"conv1d_norm_mish: residual must be {[len(x), made, x.shape[2]]}, got {tuple(residual.shape)}"
        )


@triton.jit(do_not_specialize=["rows"])
def _conv1d_sums_kernel(
    x_ptr, w_ptr, out_ptr, rows, C, N, L, x_stride_b, x_stride_c, x_stride_l, per_split,
    K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A part of the sums over channels and window of BLOCK_M places of BLOCK_N channels. A policy's UNet has few places
    # and much weight: with parts, all multiprocessors read weights.
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    item, place = row // L, row % L
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = tl.program_id(2) * per_split
    last = tl.minimum(first + per_split, C * K)
    for begin in range(first, last, BLOCK_K):
        ks = begin + tl.arange(0, BLOCK_K)
        at = place[:, None] + (ks % K)[None, :] - K // 2
        inside = (row < rows)[:, None] & (ks < last)[None, :] & (at >= 0) & (at < L)
        x_at = item[:, None] * x_stride_b + (ks // K).to(tl.int64)[None, :] * x_stride_c + at * x_stride_l
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0)
        w_at = cols.to(tl.int64)[None, :] * (C * K) + ks[:, None]
        w = tl.load(w_ptr + w_at, mask=(ks < last)[:, None] & (cols < N)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    out_at = ((tl.program_id(2) * (rows // L) + item)[:, None] * N + cols[None, :]) * L + place[:, None]
    tl.store(out_ptr + out_at, acc, mask=(row < rows)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["items"])
def _norm_mish_kernel(
    sums_ptr, bias_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, residual_ptr, out_ptr, items, N, L, G, splits, eps,
    scale_stride, shift_stride, residual_b, residual_c, residual_l,
    HAS_BIAS: tl.constexpr, FILM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_L: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program for each group of channels of an item, which it holds.
    item = (tl.program_id(0) // G).to(tl.int64)
    per_group = N // G
    own = tl.arange(0, BLOCK_C)
    places = tl.arange(0, BLOCK_L)
    channels = (tl.program_id(0) % G) * per_group + own
    known = own < per_group
    inside = known[:, None] & (places < L)[None, :]
    at = (item * N + channels.to(tl.int64))[:, None] * L + places[None, :]
    x = tl.zeros([BLOCK_C, BLOCK_L], tl.float32)
    for first in range(0, splits, 4):
        for i in tl.static_range(4):  # loads that do not wait for each other
            there = inside & (first + i < splits)
            x += tl.load(sums_ptr + (first + i) * (items.to(tl.int64) * N * L) + at, mask=there, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + channels, mask=known, other=0.0).to(tl.float32)[:, None]
    count = per_group * L
    mean = tl.sum(tl.sum(tl.where(inside, x, 0.0), axis=1), axis=0) / count
    away = tl.where(inside, x - mean, 0.0)
    y = away * tl.rsqrt(tl.sum(tl.sum(away * away, axis=1), axis=0) / count + eps)
    w = tl.load(w_ptr + channels, mask=known, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + channels, mask=known, other=0.0).to(tl.float32)
    y = y * w[:, None] + b[:, None]
    e = tl.exp(tl.minimum(y, 20.0))  # tanh(log(1 + e)) is 1 from 20 on
    n = e * (e + 2.0)
    made = tl.where(y > 20.0, y, y * (n / (n + 2.0)))
    made = tl.where(y == y, made, y)  # minimum may drop a NaN
    if FILM:
        scale = tl.load(scale_ptr + item * scale_stride + channels, mask=known, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + item * shift_stride + channels, mask=known, other=0.0).to(tl.float32)
        made = made * scale[:, None] + shift[:, None]
    if HAS_RESIDUAL:
        from_at = residual_ptr + item * residual_b + channels.to(tl.int64)[:, None] * residual_c
        made += tl.load(from_at + places[None, :] * residual_l, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), mask=inside)


def _supports_triton(
    x: T, weight: T, bias: T | None, norm_weight: T, norm_bias: T, num_groups: int, eps: float = 1e-5,
    scale: T | None = None, shift: T | None = None, residual: T | None = None,
) -> str | None:  # fmt: skip
    given = [weight, bias, norm_weight, norm_bias, scale, shift, residual]
    if x.dtype not in FLOATS or any(t is not None and t.dtype != x.dtype for t in given):
        return f"x is {x.dtype}, or another tensor is not: all float16, all bfloat16 or all float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if any(t is not None and t.stride(-1) != 1 for t in (scale, shift)):
        return "scale or shift is not contiguous over channels"
    held = next_power_of_2(weight.shape[0] // num_groups) * next_power_of_2(x.shape[2])
    return f"a group of {held} elements is over {TILE}" if held > TILE else None


def _triton(
    x: T, weight: T, bias: T | None, norm_weight: T, norm_bias: T, num_groups: int, eps: float = 1e-5,
    scale: T | None = None, shift: T | None = None, residual: T | None = None,
) -> T:  # fmt: skip
    _check(x, weight, bias, norm_weight, norm_bias, num_groups, scale, shift, residual)
    (items, channels, length), (made, _, window) = x.shape, weight.shape
    out = torch.empty(items, made, length, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, terms = items * length, channels * window
    block_m = min(64, max(16, next_power_of_2(rows)))
    few = rows <= 64  # one tile: the kernel waits for weights
    block_n = 16 if made < 32 else 32 if few or made < 64 else 64
    # Of more than one tile, three programs of a multiprocessor wait for memory at the same time
    block_k = min(64 if few else 32, max(16, next_power_of_2(terms)))
    tiles = cdiv(rows, block_m) * cdiv(made, block_n)
    wanted = multiprocessors(x.device) * (1 if few else 3)
    splits = min(max(1, wanted // tiles), cdiv(terms, 2 * block_k))
    per_split = cdiv(cdiv(terms, splits), block_k) * block_k
    splits = cdiv(terms, per_split)
    # float32's digits cost nothing there, and a window of 1 is a product, which PyTorch does not compute in TF32
    precision = "tf32x3" if few or window == 1 else "tf32"
    allowed = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    if x.dtype == torch.float32 and not (x.is_cuda and allowed == "tf32"):
        precision = "ieee"
    sums = torch.empty(splits, items, made, length, dtype=torch.float32, device=x.device)
    launch_kernel(
        _conv1d_sums_kernel, (cdiv(rows, block_m), cdiv(made, block_n), splits),
        x, weight.contiguous(), sums, rows, channels, made, length, *x.stride(), per_split,
        K=window, PRECISION=precision, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=4, num_stages=4 if few else 3,
    )  # fmt: skip
    launch_kernel(
        _norm_mish_kernel, (items * num_groups,),
        sums, bias, norm_weight, norm_bias, scale, shift, residual, out, items, made, length, num_groups, splits, eps,
        0 if scale is None else scale.stride(0), 0 if shift is None else shift.stride(0),
        *((0, 0, 0) if residual is None else residual.stride()),
        HAS_BIAS=bias is not None, FILM=scale is not None, HAS_RESIDUAL=residual is not None,
        BLOCK_C=next_power_of_2(made // num_groups), BLOCK_L=next_power_of_2(length), num_warps=4,
    )  # fmt: skip
    return out


def _torch(
    x: T, weight: T, bias: T | None, norm_weight: T, norm_bias: T, num_groups: int, eps: float = 1e-5,
    scale: T | None = None, shift: T | None = None, residual: T | None = None,
) -> T:  # fmt: skip
    _check(x, weight, bias, norm_weight, norm_bias, num_groups, scale, shift, residual)
    y = F.conv1d(x, weight, bias, padding=weight.shape[2] // 2)
    y = F.mish(torch.group_norm(y, num_groups, norm_weight, norm_bias, eps))
    if scale is not None and shift is not None:
        y = torch.addcmul(shift[:, :, None], y, scale[:, :, None])
    return (y if residual is None else y + residual).contiguous()


def _supports_torch(x: T, *rest: Any) -> str | None:
    if x.dtype not in (torch.float32, torch.float64):
        return f"x is {x.dtype}: the steps between would be rounded"
    return "x has no elements" if x.numel() == 0 else None


conv1d_norm_mish = define(
    "conv1d_norm_mish(Tensor x, Tensor weight, Tensor? bias, Tensor norm_weight, Tensor norm_bias, int num_groups,"
    " float eps=1e-5, Tensor? scale=None, Tensor? shift=None, Tensor? residual=None) -> Tensor",
    fake=lambda x, weight, *args, **kwargs: x.new_empty(x.shape[0], weight.shape[0], x.shape[2]),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu"), supports=_supports_torch),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias, norm_weight, norm_bias, num_groups, eps, scale, shift, residual = assemble.filled(
        args, 10, 1e-5, None, None, None
    )
    if bias is None or eps != 1e-5:
        raise ValueError(f"{cls.__name__} has a bias, and an eps of 1e-5, got {eps}")
    assemble.refuse(cls, scale=scale, shift=shift, residual=residual)
    module = assemble.make(cls, x, x.shape[1], weight.shape[0], weight.shape[2], num_groups)
    parts = {"0.weight": weight, "0.bias": bias, "1.weight": norm_weight, "1.bias": norm_bias}
    return partial(assemble.load(module, {f"block.{name}": t for name, t in parts.items()}), x)


def _case(name: str, tag: str, batch: int, channels: int, outer: int, length: int, dtype: str = "float32",
          weight: float = 1, window: int = 5, groups: int = 8, **more: bool) -> Case:  # fmt: skip
    dims = {
        "samples": batch, "channels": channels, "outer": outer, "length": length, "window": window,
        "num_groups": groups, **more,
    }  # fmt: skip
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="conv1d_norm_mish",
    level=2,
    reference=reference,
    op=conv1d_norm_mish,
    cases=(  # the UNet of simple DP3, for one environment and for 100
        _case("down_16", "model", 1, 128, 256, 8, weight=1, film=True),
        _case("down_16_residual", "model", 1, 256, 256, 8, weight=1, residual=True),
        _case("dp3_middle", "model", 1, 384, 384, 4, weight=2, film=True),
        _case("middle_residual", "model", 1, 384, 384, 4, weight=2, residual=True),
        _case("up", "model", 1, 768, 256, 4, weight=1, film=True),
        _case("last", "model", 1, 128, 128, 16, weight=1),
        _case("middle_100", "model", 100, 384, 384, 4, weight=1, film=True),
        _case("up_100", "model", 100, 512, 128, 8, weight=1, film=True),
        _case("one", "odd", 1, 1, 1, 1, window=1, groups=1),
        _case("two", "odd", 2, 3, 6, 5, window=3, groups=2, film=True),
        _case("odd_63", "odd", 3, 63, 24, 7, groups=3, residual=True),
        _case("half", "odd", 2, 20, 40, 9, "float16", film=True, residual=True),
        _case("odd_half", "odd", 1, 33, 18, 13, "float16", window=3, groups=2),
        _case("plain", "odd", 5, 8, 8, 16, affine=False, film=True),
        _case("long", "odd", 1, 6, 4, 130, window=7, groups=1, residual=True),
        _case("bfloat16", "odd", 2, 17, 16, 8, "bfloat16", film=True),
    ),
    arguments=(
        Tensor("x", "samples channels length"),
        Tensor("weight", "outer channels window", values=fan_in),
        Tensor("bias", "outer", when="affine", std=0.1),
        Tensor("norm_weight", "outer", mean=1, std=0.1),
        Tensor("norm_bias", "outer", std=0.1),
        Scalar("num_groups"),
        Scalar("eps", default=1e-5),
        Tensor("scale", "samples outer", when="film", mean=1, std=0.5),
        Tensor("shift", "samples outer", when="film", std=0.5),
        Tensor("residual", "samples outer length", when="residual"),
    ),
    outputs=(Tensor("out", "samples outer length"),),
    axes={
        "samples": Axis.per_call(),
        "channels": Axis.width(),
        "outer": Axis.width(),
        "length": Axis.count(),
        "window": Axis.count(),
        "affine": Axis.option(True, stated=True),
        "film": Axis.option(False),
        "residual": Axis.option(False),
    },
    constraints=("outer % num_groups == 0", "window % 2 == 1"),
    mixed=True,
    flops="2 * samples * length * outer * channels * window",
    build=_build,
)
