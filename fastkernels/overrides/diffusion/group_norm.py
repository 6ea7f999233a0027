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

TILE = 4096  # elements of a step of a program
WAVES = 4  # programs of the first kernel for each multiprocessor


def reference(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = False,
) -> torch.Tensor:
    """x: [B, C, ...], C a multiple of num_groups; weight, bias: [C] or None. silu: also y * sigmoid(y).

    Computed in at least float32, rounded once; returns x's shape and dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if t is None else t.to(acc) for t in (weight, bias))
    groups = x.to(acc).reshape(len(x), num_groups, -1)
    # The mean is subtracted first: PyTorch's kernel loses digits where a group's values are almost equal.
    groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    shape = (-1, *[1] * (x.dim() - 2))
    y = y if w is None else y * w.view(shape)
    y = y if b is None else y + b.view(shape)
    return (F.silu(y) if silu else y).to(x.dtype)


@triton.jit
def _group_norm_sums_kernel(
    x_ptr, sums_ptr, G, C, P, stride_b, stride_c, stride_p, n_splits, per_split,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # Mean and sum of squared deviations of a part of a group's pixels. Chunks are combined with Chan's formula: a
    # difference of two sums would lose the variance of values with a large mean.
    group, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, BLOCK_C)[:, None]
    x_at = x_ptr + (group // G) * stride_b + ((group % G) * C + channels) * stride_c
    first = split * per_split
    last = tl.minimum(first + per_split, P)
    count, mean, spread = 0.0, 0.0, 0.0
    for begin in range(first, last, BLOCK_P):
        pixels = begin + tl.arange(0, BLOCK_P)[None, :]
        inside = (channels < C) & (pixels < last)
        x = tl.load(x_at + pixels.to(tl.int64) * stride_p, mask=inside, other=0.0).to(tl.float32)
        n = C * tl.minimum(last - begin, BLOCK_P).to(tl.float32)
        own = tl.sum(tl.sum(x, axis=1), axis=0) / n
        centered = tl.where(inside, x - own, 0.0)
        own_spread = tl.sum(tl.sum(centered * centered, axis=1), axis=0)
        total = count + n
        step = own - mean
        mean += step * (n / total)
        spread += own_spread + step * step * (count * n / total)
        count = total
    at = sums_ptr + (group * n_splits + split) * 3
    tl.store(at, count)
    tl.store(at + 1, mean)
    tl.store(at + 2, spread)


@triton.jit
def _group_norm_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, sums_ptr, G, C, P, stride_b, stride_c, stride_p, out_b, out_c, out_p, n_splits, eps,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    group = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SPLITS)
    at = sums_ptr + (group * n_splits + parts) * 3
    counts = tl.load(at, mask=parts < n_splits, other=0.0)
    means = tl.load(at + 1, mask=parts < n_splits, other=0.0)
    spreads = tl.load(at + 2, mask=parts < n_splits, other=0.0)
    total = tl.sum(counts, axis=0)
    mean = tl.sum(counts * means, axis=0) / total
    spread = tl.sum(spreads + counts * (means - mean) * (means - mean), axis=0)
    channels = (group % G) * C + tl.arange(0, BLOCK_C)
    known = tl.arange(0, BLOCK_C) < C
    scale = tl.full([BLOCK_C], 1.0, tl.float32) * tl.rsqrt(spread / total + eps)
    if HAS_W:
        scale *= tl.load(w_ptr + channels, mask=known, other=0.0).to(tl.float32)
    pixels = tl.program_id(1).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = known[:, None] & (pixels < P)[None, :]
    image = group // G
    x_at = x_ptr + image * stride_b + channels[:, None] * stride_c + pixels[None, :] * stride_p
    x = tl.load(x_at, mask=inside, other=0.0)
    y = (x.to(tl.float32) - mean) * scale[:, None]
    if HAS_B:
        y += tl.load(b_ptr + channels, mask=known, other=0.0).to(tl.float32)[:, None]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    out_at = out_ptr + image * out_b + channels[:, None] * out_c + pixels[None, :] * out_p
    tl.store(out_at, y.to(x.dtype), mask=inside)


def _check(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> None:  # fmt: skip
    if x.dim() < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: x must be [B, C, ...] with C a multiple of {num_groups} groups, got {tuple(x.shape)}"
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[1:2]:
            raise ValueError(f"group_norm: {name} {tuple(t.shape)} is not for x {tuple(x.shape)}")


def _pixel_stride(x: torch.Tensor) -> int | None:
    """The distance of neighboring pixels of x [B, C, ...]; None if the sizes behind C are not one run of memory."""
    sizes = [(n, s) for n, s in zip(x.shape[2:], x.stride()[2:], strict=True) if n != 1]
    if any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(sizes)):
        return None
    return sizes[-1][1] if sizes else 1


def _supports_triton(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    *_: object,
) -> str | None:  # fmt: skip
    if x.dtype not in FLOATS:
        return f"x has dtype {x.dtype}, not float16, bfloat16 or float32"
    if x.dim() < 2 or _pixel_stride(x) is None:
        return f"x of shape {tuple(x.shape)} has strides {tuple(x.stride())}: pixels need one stride"
    if x.shape[1] // num_groups > TILE:
        return f"{x.shape[1] // num_groups} channels of a group are over {TILE}"
    return unsupported_vector(weight, "weight") or unsupported_vector(bias, "bias")


def _triton(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, silu: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check(x, num_groups, weight, bias)
    out = torch.empty_like(x)  # in the same memory format
    if out.numel() == 0:
        return out
    batch, channels = x.shape[0], x.shape[1] // num_groups
    pixels, stride, out_stride = math.prod(x.shape[2:]), _pixel_stride(x), _pixel_stride(out)
    assert stride is not None and out_stride is not None, (x.stride(), out.stride())
    block_c = next_power_of_2(channels)
    block_p = min(max(TILE // block_c, 1), next_power_of_2(pixels))
    groups, steps = batch * num_groups, cdiv(pixels, block_p)
    splits = min(steps, max(1, cdiv(WAVES * multiprocessors(x.device), groups)))
    per_split = cdiv(steps, splits) * block_p
    splits = cdiv(pixels, per_split)
    sums = torch.empty(groups * splits * 3, dtype=torch.float32, device=x.device)
    blocks = {"BLOCK_C": block_c, "BLOCK_P": block_p, "num_warps": 4}
    at = (num_groups, channels, pixels, x.stride(0), x.stride(1), stride)
    launch_kernel(_group_norm_sums_kernel, (groups, splits), x, sums, *at, splits, per_split, **blocks)
    launch_kernel(
        _group_norm_kernel, (groups, steps), x, weight, bias, out, sums, *at, out.stride(0), out.stride(1), out_stride,
        splits, eps, HAS_W=weight is not None, HAS_B=bias is not None, SILU=silu, SPLITS=next_power_of_2(splits),
        **blocks,
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, silu: bool = False,
) -> torch.Tensor:  # fmt: skip
    _check(x, num_groups, weight, bias)
    found = reference(x, num_groups, weight, bias, eps, silu)
    return torch.empty_like(x).copy_(found)  # the fake's strides, whatever PyTorch's kernel gives


group_norm = define(
    "group_norm(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, bool silu=False)"
    " -> Tensor",
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
        _case("unet_128", "model", 2, 320, 128, 128, weight=14, silu=True),
        _case("unet_64", "model", 2, 640, 64, 64, weight=14, silu=True),
        _case("unet_32", "model", 2, 1280, 32, 32, weight=20, silu=True),
        _case("unet_32_attention", "model", 2, 1280, 32, 32, weight=6),
        _case("vae_1024", "model", 1, 128, 1024, 1024, weight=1, silu=True),
        _case("one", "odd", 1, 1, 1, 1, 1, "float32"),
        _case("odd_63", "odd", 2, 15, 9, 7, 5, weight=1, silu=True),
        _case("odd_half", "odd", 3, 12, 33, 31, 2, "float16"),
        _case("plain", "odd", 2, 6, 65, 65, 3, "float32", affine=False, silu=True),
        _case("channels", "odd", 3, 48, 5, 1, 16, "float32"),
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
    ),
    outputs=(Tensor("out", "batch channels rows columns"),),
    axes={
        "batch": Axis.per_call(),
        "channels": Axis.width(),
        "rows": Axis.per_call(),
        "columns": Axis.per_call(),
        "affine": Axis.option(True, stated=True),
    },
    constraints=("channels % num_groups == 0",),
    constructor={"num_channels": "channels"},
    flops="9 * batch * channels * rows * columns",
)
