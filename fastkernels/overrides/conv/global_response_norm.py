"""Global response norm, y = x + b + w x n with n = |x| / mean(|x|) over an image: ConvNeXtV2 (arXiv 2301.00808)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.assemble import filled, load, make
from fastkernels.core.case import Tolerance
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.conv.channel_sums import BLOCK_T, block_of, channel_sums
from fastkernels.overrides.conv.spatial import unsupported
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import unsupported_vector


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x: [B, T, C], the T tokens of each image; weight, bias: [C]. Returns [B, T, C] in x's dtype.

    A channel's norm |x| is over the tokens, and the mean of the norms over the channels. Computed in at least float32,
    rounded once.
    """
    _check(x, weight, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    norms = h.square().sum(1, keepdim=True).sqrt()
    n = norms / (norms.mean(2, keepdim=True) + eps)
    return (h + bias.to(acc) + weight.to(acc) * h * n).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    if x.dim() != 3 or weight.shape != x.shape[2:] or bias.shape != x.shape[2:]:
        raise ValueError(
            f"global_response_norm: x {tuple(x.shape)} must be [B, T, C], weight {tuple(weight.shape)} and bias"
            f" {tuple(bias.shape)} [C]"
        )


PROGRAMS = 512  # that read an image at the same time: about four for each multiprocessor of an H200
SUMS = 1 << 15  # that a program of the second kernel reads at once


@triton.jit(do_not_specialize=["parts"])
def _response_kernel(
    sums_ptr, out_ptr, parts, C, eps, PARTS: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per image: the norms of its channels over their mean. All parts are read at once: one after the other,
    # each would cost the latency of the memory. WHOLE: BLOCK_C are all channels.
    follow(OVERLAP)
    image = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    part = tl.arange(0, PARTS)
    for begin in range(0, C, BLOCK_C):
        cols = begin + tl.arange(0, BLOCK_C)
        known = (part < parts)[:, None] & (cols < C)[None, :]
        at = sums_ptr + (image * parts + part[:, None]) * C + cols[None, :]
        norms = tl.sqrt(tl.sum(tl.load(at, mask=known, other=0.0), axis=0))
        total += norms
        if not WHOLE:
            tl.store(out_ptr + image * C + cols, norms, mask=cols < C)
    scale = 1.0 / (tl.sum(total, axis=0) / C + eps)
    if WHOLE:
        cols = tl.arange(0, BLOCK_C)
        tl.store(out_ptr + image * C + cols, total * scale, mask=cols < C)
    else:
        for begin in range(0, C, BLOCK_C):  # each thread reads what it wrote
            cols = begin + tl.arange(0, BLOCK_C)
            norms = tl.load(out_ptr + image * C + cols, mask=cols < C, other=0.0)
            tl.store(out_ptr + image * C + cols, norms * scale, mask=cols < C)


@triton.jit
def _respond_kernel(
    x_ptr, n_ptr, w_ptr, b_ptr, out_ptr, T, C, n_tiles, stride_b, stride_t, stride_c,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image = (tl.program_id(0) // n_tiles).to(tl.int64)
    t = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = (t < T)[:, None] & (cols < C)[None, :]
    x_at = x_ptr + image * stride_b + t[:, None] * stride_t + cols.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_at, mask=known, other=0.0).to(tl.float32)
    n = tl.load(n_ptr + image * C + cols, mask=cols < C, other=0.0)
    n *= tl.load(w_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    y = x + b[None, :] + x * n[None, :]
    out_at = out_ptr + (image * T + t)[:, None] * C + cols[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=known)


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6
) -> str | None:
    return unsupported(x) or unsupported_vector(weight, "weight") or unsupported_vector(bias, "bias")


def _triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    _check(x, weight, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    batch, tokens, channels = x.shape
    sums = channel_sums(x, squares=True, block_t=2 * BLOCK_T, programs=PROGRAMS)
    n = torch.empty(batch, channels, dtype=torch.float32, device=x.device)
    parts = next_power_of_2(sums.shape[1])
    at_once = min(next_power_of_2(channels), SUMS // parts)
    launch_kernel(
        _response_kernel, (batch,), sums, n, sums.shape[1], channels, eps, PARTS=parts, BLOCK_C=at_once,
        WHOLE=channels <= at_once, num_warps=16 if parts * at_once >= SUMS // 2 else 8,
    )  # fmt: skip
    tiles, block = cdiv(tokens, BLOCK_T), block_of(channels)
    if x.stride(2) == 1:
        block = min(2 * block, next_power_of_2(channels))
    launch_kernel(
        _respond_kernel, (batch * tiles, cdiv(channels, block)),
        x, n, weight, bias, out, tokens, channels, tiles, *x.stride(),
        BLOCK_T=BLOCK_T, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out


global_response_norm = define(
    "global_response_norm(Tensor x, Tensor weight, Tensor bias, float eps=1e-6) -> Tensor",
    fake=lambda x, *args, **kwargs: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias, eps = filled(args, 4, 1e-6)
    module = load(make(cls, x, x.shape[2], eps), {"weight": weight, "bias": bias})
    return lambda: module(x[:, :, None])[:, :, 0]  # one column


def _case(name: str, tag: str, batch: int, tokens: int, channels: int, dtype: str = "bfloat16",
          weight: float = 1) -> Case:  # fmt: skip
    return Case(name, {"batch": batch, "tokens": tokens, "channels": channels}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="global_response_norm",
    level=1,
    reference=reference,
    op=global_response_norm,
    cases=(  # ConvNeXtV2 base at 384 px: MLPs of stages 1 and 3
        _case("convnext_96", "model", 8, 9216, 512, weight=3),
        _case("convnext_24", "model", 8, 576, 2048, weight=27),
        _case("convnext_24_1", "model", 1, 576, 2048, weight=27),
        _case("one", "odd", 1, 1, 1, "float32"),
        _case("odd_63", "odd", 2, 63, 17, "float32"),
        _case("odd_1000", "odd", 1, 1000, 5),
        _case("wide", "odd", 2, 3, 1128, "float16"),
        _case("row", "odd", 3, 1, 65, "float32"),
        _case("half", "odd", 1, 35, 40, "float16"),
        _case("parts", "odd", 2, 513, 9),
    ),
    arguments=(
        Tensor("x", "batch tokens channels"),
        Tensor("weight", "channels", std=0.5),
        Tensor("bias", "channels", std=0.5),
        Scalar("eps", default=1e-6),
    ),
    outputs=(Tensor("out", "batch tokens channels"),),
    axes={"batch": Axis.per_call(), "tokens": Axis.per_call(), "channels": Axis.width()},
    build=_build,
    flops="6 * batch * tokens * channels",
    activations=("x",),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
    },
)  # fmt: skip
