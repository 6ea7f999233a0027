"""Quantization to float8 e4m3 with scales per tensor, token or group of columns (Micikevicius, arXiv 2209.05433)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, Expr, OpSpec, Scalar, Tensor, Tolerance, full, uniform
from fastkernels.overrides.kit.fp8 import (
    GROUP_EPS,
    MAX_COLUMNS,
    MIN_ABSMAX,
    ValuesAndScales,
    check,
    column_major,
    empty_outputs,
    fp8_inverse,
    fp8_refusal,
    fp8_scale,
    laid_out,
    quantize_rows,
    to_fp8,
)
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows
from fastkernels.overrides.quant.groups import launch_groups


def reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    """x: [..., N]. Returns (values [..., N] in float8 e4m3, scales in float32) with values * scales about x.

    scale       a given scale of one value; None: scales map max(absolute maximum, min_absmax) to 448
    group_size  the extent of the maximum: 0 the tensor (scales [1]), -1 a token ([..., 1]), g columns ([..., N / g])
    scale_ub    one value, an upper bound of the maximum
    column_major_scales, tma_aligned_scales  memory layout of the scales, see empty_outputs
    scale_ue8m0 scales are rounded up to powers of two
    A float64 x gives float64 values that are not rounded.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    values, scales = quantize_rows(y, scale, group_size, scale_ub, min_absmax, scale_ue8m0)
    return values, column_major(scales, column_major_scales, tma_aligned_scales)


@triton.jit
def _block(x_ptr, block, x_stride0, x_stride1, n_inner, N, n_blocks, BLOCK: tl.constexpr):
    """One block of a row: its values, their output offsets, and the mask of those that exist."""
    row = (block // n_blocks).to(tl.int64)
    cols = (block % n_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = (row // n_inner) * x_stride0 + (row % n_inner) * x_stride1
    x = tl.load(x_ptr + start + cols, mask=cols < N, other=0.0).to(tl.float32)
    return x, row * N + cols, cols < N


@triton.jit(do_not_specialize=["n_blocks", "total"])
def _absmax_kernel(
    x_ptr, part_ptr, x_stride0, x_stride1, n_inner, N, n_blocks, total, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in range(tl.program_id(0), total, tl.num_programs(0)):
        x, _, _ = _block(x_ptr, block, x_stride0, x_stride1, n_inner, N, n_blocks, BLOCK)
        most = tl.maximum(most, tl.abs(x))
    tl.store(part_ptr + tl.program_id(0), tl.max(most, axis=0))


@triton.jit(do_not_specialize=["n_blocks"])
def _tensor_kernel(
    x_ptr, part_ptr, q_ptr, s_ptr, x_stride0, x_stride1, n_inner, N, n_blocks, n_parts, min_absmax,
    STATIC: tl.constexpr, UE8M0: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # Every program reduces the partial results of _absmax_kernel: no atomics, and no memory to clear first.
    block = tl.program_id(0)
    if STATIC:
        scale = tl.load(part_ptr).to(tl.float32)
    else:
        part = tl.arange(0, PARTS)
        absmax = tl.max(tl.load(part_ptr + part, mask=part < n_parts, other=0.0), axis=0)
        scale = fp8_scale(absmax, min_absmax, UE8M0)
    if block == 0:
        tl.store(s_ptr, scale)
    x, to, mask = _block(x_ptr, block, x_stride0, x_stride1, n_inner, N, n_blocks, BLOCK)
    tl.store(q_ptr + to, to_fp8(x * fp8_inverse(scale)), mask=mask)


def supports_triton(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> str | None:
    if scale is None and (group_size if group_size >= 0 else x.shape[-1]) > MAX_COLUMNS:
        return f"a group of {x.shape[-1]} columns is over {MAX_COLUMNS}"
    if column_major_scales and x.dim() != 2:
        return f"column-major scales of x with {x.dim()} dimensions"
    if x.numel() >= 1 << 38:
        return f"{x.numel()} values are more than 2^38"
    return fp8_refusal(x.device) or unsupported_rows(x)


def quantize_triton(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    n = x.shape[-1]
    check("quantize_fp8", n, scale, group_size)
    per_tensor = scale is not None or group_size == 0
    q, s = empty_outputs(x.shape, x.device, per_tensor, group_size, column_major_scales, tma_aligned_scales)
    size = x.numel()
    n_inner, stride0, stride1 = rows(x) or (1, 0, 0)
    if x.is_contiguous() and per_tensor:
        n_inner, stride0, stride1, n = 1, size, 0, size
    if per_tensor and (scale is not None or n != size or not 0 < size <= 16384):
        _per_tensor(x, q, s, scale, n_inner, stride0, stride1, n, min_absmax, scale_ue8m0)
        return q, s
    width = group_size if group_size > 0 else n
    launch_groups(x, scale_ub, q, s, (n_inner, stride0, stride1), n, width, min_absmax, scale_ue8m0)
    return q, s


def _per_tensor(
    x: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    scale: torch.Tensor | None,
    n_inner: int,
    stride0: int,
    stride1: int,
    n: int,
    min_absmax: float,
    scale_ue8m0: bool,
) -> None:
    size = x.numel()
    # 512 blocks fill the 132 multiprocessors of an H200; 4096 values per block keep enough loads in flight.
    block = max(512, min(4096, next_power_of_2(cdiv(size, 512)), next_power_of_2(n)))
    n_blocks = cdiv(n, block)
    total, warps, parts = size // max(n, 1) * n_blocks, block // 512, 1
    if scale is None:
        # A multiple of 16. Programs without a block find 0; of an empty x, the first one writes the scale.
        parts = min(cdiv(max(total, 1), 16) * 16, 1024)
        part = torch.empty(parts, dtype=torch.float32, device=x.device)
        launch_kernel(
            _absmax_kernel, (parts,),
            x, part, stride0, stride1, n_inner, n, n_blocks, total, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    launch_kernel(
        _tensor_kernel, (max(total, 1),),
        x, part if scale is None else scale, q, s, stride0, stride1, n_inner, n, n_blocks, parts, min_absmax,
        STATIC=scale is not None, UE8M0=scale_ue8m0, PARTS=next_power_of_2(parts), BLOCK=block,
        num_warps=warps,
    )  # fmt: skip


def _reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    check("quantize_fp8", x.shape[-1], scale, group_size)
    found = reference(
        x, scale, group_size, scale_ub, min_absmax, column_major_scales, tma_aligned_scales, scale_ue8m0
    )
    per_tensor = scale is not None or group_size == 0
    return laid_out(found, per_tensor, group_size, column_major_scales, tma_aligned_scales)


def _fake(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    per_tensor = scale is not None or group_size == 0
    return empty_outputs(x.shape, x.device, per_tensor, group_size, column_major_scales, tma_aligned_scales)


quantize_fp8 = define(
    "quantize_fp8(Tensor x, Tensor? scale=None, int group_size=0, Tensor? scale_ub=None,"
    " float min_absmax=0.001953125, bool column_major_scales=False, bool tma_aligned_scales=False,"
    " bool scale_ue8m0=False) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", quantize_triton, devices=("cuda",), supports=supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def tokens_of_different_sizes(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Activations whose tokens need different scales, so that a wrong token's scale is an error."""
    return (call.randn(*shape) * call.rand(*shape[:-1], 1).mul(6).exp2()).to(dtype)


def _zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0


def _one_large(args: list[Any]) -> None:
    if args[0].numel():
        args[0][-1, ..., -1] = 3e4


SPEC = OpSpec(
    name="quantize_fp8",
    level=1,
    by_default=True,
    reference=reference,
    op=quantize_fp8,
    cases=(
        Case("static_32", {"tokens": 32, "hidden": 4096, "static": True}, weight=64, tags=("model",)),
        Case("tensor_8k", {"tokens": 8192, "hidden": 4096}, weight=1, tags=("model",)),
        Case("token_1", {"tokens": 1, "hidden": 4096, "group": -1}, weight=64, tags=("model",)),
        Case("token_32", {"tokens": 32, "hidden": 14336, "group": -1}, weight=32, tags=("model",)),
        Case("token_8k", {"tokens": 8192, "hidden": 4096, "group": -1}, weight=1, tags=("model",)),
        Case("deepseek_32", {"tokens": 32, "hidden": 7168, "group": 128}, weight=61, tags=("model",)),
        Case(
            "deepseek_4k",
            {"tokens": 4096, "hidden": 7168, "group": 128, "column_major": True, "tma_aligned": True},
            tags=("model",),
        ),
        Case("group_63", {"tokens": 63, "hidden": 384, "group": 128}, tags=("odd",)),
        Case("one", {"tokens": 1, "hidden": 1, "group": -1}, dtype="float32", tags=("odd",)),
        Case("token_1000", {"tokens": 63, "hidden": 1000, "group": -1, "upper_bound": True}, tags=("odd",)),
        Case(
            "token_strided",
            {"tokens": 5, "hidden": 1128, "group": -1, "pad": 8},
            dtype="float16",
            tags=("odd",),
        ),
        Case("static_odd", {"tokens": 7, "hidden": 577, "static": True}, tags=("odd",)),
        Case("static_strided", {"tokens": 9, "hidden": 130, "static": True, "pad": 3}, tags=("odd",)),
        Case("tensor_small", {"tokens": 7, "hidden": 63}, dtype="float32", tags=("odd",)),
        Case("tensor_odd", {"tokens": 33, "hidden": 1000}, dtype="float16", tags=("odd",)),
        Case("tensor_strided", {"tokens": 3, "hidden": 1000, "pad": 1}, dtype="float32", tags=("odd",)),
        Case(
            "ue8m0",
            {"tokens": 19, "hidden": 512, "group": 128, "ue8m0": True},
            dtype="float32",
            tags=("odd",),
        ),
        Case(
            "column_major",
            {"tokens": 5, "hidden": 256, "group": 64, "column_major": True, "tma_aligned": True},
            tags=("odd",),
        ),
        Case("group_48", {"tokens": 5, "hidden": 240, "group": 48, "column_major": True}, tags=("odd",)),
        Case("heads", {"tokens": 3, "inner": 5, "hidden": 64, "group": 32}, dtype="float16", tags=("odd",)),
        Case("no_token", {"tokens": 0, "hidden": 256, "group": 128}, tags=("odd",)),
        Case("no_row", {"tokens": 0, "hidden": 64}, tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens inner? hidden", values=tokens_of_different_sizes, pad="pad"),
        Tensor("scale", "1", "float32", when="static", values=uniform(0.05, 0.15), bytes="0"),
        Scalar("group_size", "group", default=0),
        Tensor("scale_ub", "1", "float32", when="upper_bound", values=full(8.0), bytes="0"),
        Scalar("min_absmax", value=f"{GROUP_EPS} if group > 0 else {MIN_ABSMAX}"),
        Scalar("column_major_scales", "column_major", default=False),
        Scalar("tma_aligned_scales", "tma_aligned", default=False),
        Scalar("scale_ue8m0", "ue8m0", default=False),
    ),
    outputs=(
        Tensor("values", "tokens inner? hidden", "float8_e4m3fn"),
        Tensor("scales", {"static or group == 0": "1", "": "tokens inner? groups"}, "float32"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "inner": Axis.count(),
        "hidden": Axis.width(),
        "groups": Axis(Expr("1 if group <= 0 else hidden // group")),
    },
    constraints=("group <= 0 or hidden % group == 0",),
    constructor={"group_shape": "(-1, -1) if static or group == 0 else (1, group)", "use_ue8m0": "ue8m0"},
    flops="4 * tokens * inner * hidden",
    # Scales may differ in the last bit. Values are compared with the unrounded quotient: half a step of three mantissa
    # bits, or of the subnormals' 2^-9, plus the effect of the scale's last bit.
    tolerance={
        **dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(0.0, 2.5e-7)),
        "float8_e4m3fn": Tolerance(0.98e-3, 0.06251),
    },
    extremes={"zero_tokens": _zero_tokens, "one_large": _one_large},
)
