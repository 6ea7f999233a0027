"""Group normalization (Wu and He, arXiv 1803.08494), with the SiLU that follows it in UNets and VAEs."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, unsupported_vector

TILE, WIDEST = 4096, 128  # elements of a program's step; at most so many channels, if they are contiguous
WAVES = 4  # programs of the first kernel for each multiprocessor


def reference(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = False,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [B, C, ...], C a multiple of num_groups; weight, bias: [C] or None. silu: also y * sigmoid(y).

    shift  [B, C] or None: the norm is of x + shift, as of a convolution's result, its bias and a time embedding

    Computed in at least float32, rounded once; returns x's shape and dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if t is None else t.to(acc) for t in (weight, bias))
    shifted = x.to(acc)
    if shift is not None:
        shifted = shifted + shift.to(acc).reshape(*shift.shape, *[1] * (x.dim() - 2))
    groups = shifted.reshape(len(x), num_groups, -1)
    # The mean is subtracted first: PyTorch's kernel loses digits where a group's values are almost equal.
    groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = (-1, *[1] * (x.dim() - 2))
    y = y if w is None else y * w.view(shape)
    y = y if b is None else y + b.view(shape)
    return (F.silu(y) if silu else y).to(x.dtype)


@triton.jit
def _group_norm_sums_kernel(
    x_ptr, sums_ptr, C, P, stride_b, stride_c, stride_p, n_blocks, n_splits, per_split,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # Mean and sum of squared deviations of a part of each channel's pixels: Welford's method in each element of the
    # tile, combined with Chan's formula. A difference of two sums would lose the variance of values with a large mean.
    image, split = tl.program_id(0) // n_blocks, tl.program_id(1)
    channels = (tl.program_id(0) % n_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.arange(0, BLOCK_P)[:, None]
    x_at = x_ptr + image.to(tl.int64) * stride_b + channels.to(tl.int64)[None, :] * stride_c
    known = (channels < C)[None, :]
    first = split * per_split
    last = tl.minimum(first + per_split, P)
    count = tl.zeros([BLOCK_P, 1], tl.float32)
    means = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    spreads = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for begin in range(first, last, BLOCK_P):
        pixels = begin + rows
        inside = pixels < last
        x = tl.load(x_at + pixels.to(tl.int64) * stride_p, mask=inside & known, other=0.0).to(tl.float32)
        count += inside.to(tl.float32)
        step = tl.where(inside, x - means, 0.0)
        means += step * (1.0 / tl.maximum(count, 1.0))
        spreads += step * (x - means)
    mean = tl.sum(count * means, axis=0) / (last - first).to(tl.float32)
    away = means - mean[None, :]
    spread = tl.sum(spreads + count * away * away, axis=0)
    at = sums_ptr + ((image.to(tl.int64) * n_splits + split) * C + channels) * 2
    tl.store(at, mean, mask=channels < C)
    tl.store(at + 1, spread, mask=channels < C)


@triton.jit
def _group_norm_scales_kernel(
    sums_ptr, w_ptr, shift_ptr, scales_ptr, G, CHANNELS, P, shift_stride, n_splits, per_split, eps,
    HAS_W: tl.constexpr, HAS_SHIFT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # Of each of a group's CHANNELS: the mean that is subtracted, and the factor behind it. A shift moves its mean.
    image = (tl.program_id(0) // G).to(tl.int64)
    own = tl.arange(0, BLOCK_C)
    known = own < CHANNELS
    channels = (tl.program_id(0) % G) * CHANNELS + own
    shift = tl.zeros([BLOCK_C], tl.float32)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + image * shift_stride + channels, mask=known, other=0.0).to(tl.float32)
    at = sums_ptr + (image * n_splits * G * CHANNELS + channels[None, :]) * 2
    parts = tl.arange(0, SPLITS)[:, None]
    total, mean = 0.0, 0.0
    for begin in range(0, n_splits, SPLITS):
        used = (begin + parts < n_splits) & known[None, :]
        count = tl.where(used, tl.minimum(P - (begin + parts) * per_split, per_split).to(tl.float32), 0.0)
        means = tl.load(at + (begin + parts) * G * CHANNELS * 2, mask=used, other=0.0) + shift[None, :]
        total += tl.sum(tl.sum(count, axis=1), axis=0)
        mean += tl.sum(tl.sum(count * means, axis=1), axis=0)
    mean /= total
    spread = 0.0
    for begin in range(0, n_splits, SPLITS):
        used = (begin + parts < n_splits) & known[None, :]
        count = tl.where(used, tl.minimum(P - (begin + parts) * per_split, per_split).to(tl.float32), 0.0)
        means = tl.load(at + (begin + parts) * G * CHANNELS * 2, mask=used, other=0.0) + shift[None, :]
        spreads = tl.load(at + (begin + parts) * G * CHANNELS * 2 + 1, mask=used, other=0.0)
        spread += tl.sum(tl.sum(spreads + count * (means - mean) * (means - mean), axis=1), axis=0)
    scale = tl.full([BLOCK_C], 1.0, tl.float32) * tl.rsqrt(spread / total + eps)
    if HAS_W:
        scale *= tl.load(w_ptr + channels, mask=known, other=0.0).to(tl.float32)
    at = scales_ptr + (image * G * CHANNELS + channels) * 2
    tl.store(at, mean - shift, mask=known)
    tl.store(at + 1, scale, mask=known)


@triton.jit
def _group_norm_kernel(
    x_ptr, b_ptr, out_ptr, scales_ptr, C, P, stride_b, stride_c, stride_p, out_b, out_c, out_p, n_blocks, n_steps,
    HAS_B: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    block = tl.program_id(0) // n_steps
    image = (block // n_blocks).to(tl.int64)
    channels = (block % n_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channels < C
    at = scales_ptr + (image * C + channels) * 2
    mean = tl.load(at, mask=known, other=0.0)[None, :]
    scale = tl.load(at + 1, mask=known, other=0.0)[None, :]
    pixels = ((tl.program_id(0) % n_steps).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    inside = known[None, :] & (pixels < P)
    wide = channels.to(tl.int64)[None, :]
    x = tl.load(x_ptr + image * stride_b + wide * stride_c + pixels * stride_p, mask=inside, other=0.0)
    y = (x.to(tl.float32) - mean) * scale
    if HAS_B:
        y += tl.load(b_ptr + channels, mask=known, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + image * out_b + wide * out_c + pixels * out_p, y.to(x.dtype), mask=inside)


def _check(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, shift: torch.Tensor | None
) -> None:  # fmt: skip
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: x must be [B, C, ...] with C a multiple of {num_groups} groups, got {tuple(x.shape)}"
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[1:2]:
            raise ValueError(f"group_norm: {name} {tuple(t.shape)} is not for x {tuple(x.shape)}")
    if shift is not None and shift.shape != x.shape[:2]:
        raise ValueError(f"group_norm: shift {tuple(shift.shape)} is not [B, C] of x {tuple(x.shape)}")


def _pixel_stride(x: torch.Tensor) -> int | None:
    """The distance of neighboring pixels of x [B, C, ...]; None if the sizes behind C are not one run of memory."""
    sizes = [(n, s) for n, s in zip(x.shape[2:], x.stride()[2:], strict=True) if n != 1]
    if any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(sizes)):
        return None
    return sizes[-1][1] if sizes else 1


def _supports_triton(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, silu: bool = False, shift: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if x.dtype not in FLOATS:
        return f"x has dtype {x.dtype}, not float16, bfloat16 or float32"
    if x.dim() < 2 or _pixel_stride(x) is None:
        return f"x of shape {tuple(x.shape)} has strides {tuple(x.stride())}: pixels need one stride"
    if x.shape[1] // num_groups > TILE:
        return f"{x.shape[1] // num_groups} channels of a group are over {TILE}"
    if shift is not None and (shift.dtype not in FLOATS or shift.stride(-1) != 1):
        return f"shift is {shift.dtype} with strides {tuple(shift.stride())}"
    return unsupported_vector(weight, "weight") or unsupported_vector(bias, "bias")


def _tile(channels: int, pixels: int, stride_c: int, stride_p: int) -> dict[str, int]:
    """The tile of channels and pixels of a program, longest in the direction in which memory is contiguous."""
    if stride_c <= stride_p:
        whole = channels & -channels  # the largest power of two that divides it
        block_c = min(whole if whole >= 32 else next_power_of_2(channels), WIDEST)
        block_p = min(TILE // block_c, next_power_of_2(pixels))
    else:
        block_p = min(TILE, next_power_of_2(pixels))
        block_c = min(TILE // block_p, next_power_of_2(channels))
    return {"BLOCK_C": block_c, "BLOCK_P": block_p, "num_warps": 4}


def _triton(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, silu: bool = False, shift: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, num_groups, weight, bias, shift)
    out = torch.empty_like(x)  # in the same memory format
    if out.numel() == 0:
        return out
    batch, channels = x.shape[:2]
    pixels, stride, out_stride = math.prod(x.shape[2:]), _pixel_stride(x), _pixel_stride(out)
    assert stride is not None and out_stride is not None, (x.stride(), out.stride())
    tile = _tile(channels, pixels, x.stride(1), stride)
    blocks, steps = cdiv(channels, tile["BLOCK_C"]), cdiv(pixels, tile["BLOCK_P"])
    splits = min(steps, max(1, cdiv(WAVES * multiprocessors(x.device), batch * blocks)))
    per_split = cdiv(steps, splits) * tile["BLOCK_P"]
    splits = cdiv(pixels, per_split)
    sums = torch.empty(batch * splits * channels * 2, dtype=torch.float32, device=x.device)
    scales = torch.empty(batch * channels * 2, dtype=torch.float32, device=x.device)
    own = next_power_of_2(channels // num_groups)
    of_x = (channels, pixels, x.stride(0), x.stride(1), stride)
    launch_kernel(
        _group_norm_sums_kernel, (batch * blocks, splits), x, sums, *of_x, blocks, splits, per_split, **tile
    )
    launch_kernel(
        _group_norm_scales_kernel, (batch * num_groups,), sums, weight, shift, scales, num_groups,
        channels // num_groups, pixels, 0 if shift is None else shift.stride(0), splits, per_split, eps,
        HAS_W=weight is not None, HAS_SHIFT=shift is not None, SPLITS=min(next_power_of_2(splits), TILE // own),
        BLOCK_C=own, num_warps=4,
    )  # fmt: skip
    launch_kernel(
        _group_norm_kernel, (batch * blocks * steps,), x, bias, out, scales, *of_x, out.stride(0), out.stride(1),
        out_stride, blocks, steps, HAS_B=bias is not None, SILU=silu, **tile,
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, silu: bool = False, shift: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, num_groups, weight, bias, shift)
    found = reference(x, num_groups, weight, bias, eps, silu, shift)
    return torch.empty_like(x).copy_(found)  # the fake's strides, whatever PyTorch's kernel gives


group_norm = define(
    "group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, bool silu=False,"
    " Tensor? shift=None) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty_like(x),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, batch: int, channels: int, rows: int, columns: int, groups: int = 32,
          dtype: str = "bfloat16", weight: float = 1, **more: bool) -> Case:  # fmt: skip
    dims = {
        "batch": batch,
        "channels": channels,
        "rows": rows,
        "columns": columns,
        "num_groups": groups,
        **more,
    }
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="group_norm",
    level=2,
    reference=reference,
    op=group_norm,
    cases=(  # SDXL's UNet at 1024 px, an image and its unconditional twin; the decoder of its VAE
        _case("unet_128", "model", 2, 320, 128, 128, weight=7, silu=True),
        _case("unet_128_shift", "model", 2, 320, 128, 128, weight=7, silu=True, shift=True),
        _case("unet_64", "model", 2, 640, 64, 64, weight=14, silu=True, shift=True),
        _case("unet_32", "model", 2, 1280, 32, 32, weight=20, silu=True, shift=True),
        _case("unet_32_attention", "model", 2, 1280, 32, 32, weight=6),
        _case("vae_1024", "model", 1, 128, 1024, 1024, weight=1, silu=True),
        _case("one", "odd", 1, 1, 1, 1, 1, "float32"),
        _case("odd_63", "odd", 2, 15, 9, 7, 5, weight=1, silu=True),
        _case("odd_half", "odd", 3, 12, 33, 31, 2, "float16"),
        _case("plain", "odd", 2, 6, 65, 65, 3, "float32", affine=False, silu=True),
        _case("channels", "odd", 3, 48, 5, 1, 16, "float32", shift=True),
        _case("half", "odd", 1, 24, 17, 3, 8, "float16", silu=True),
        _case("one_group", "odd", 1, 7, 40, 31, 1, "float32", silu=True),
    ),
    arguments=(
        Tensor("x", "batch channels rows columns", mean=0.5),
        Scalar("num_groups"),
        Tensor("weight", "channels", when="affine", mean=1, std=0.1),
        Tensor("bias", "channels", when="affine", std=0.1),
        Scalar("eps", default=1e-5),
        Scalar("silu", default=False),
        Tensor("shift", "batch channels", when="shift"),
    ),
    outputs=(Tensor("out", "batch channels rows columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "affine": Axis.option(True, stated=True),
        "shift": Axis.option(False),
    },
    constraints=("channels % num_groups == 0",),
    constructor={"num_channels": "channels"},
    flops="9 * batch * channels * rows * columns",
)
