"""SwiGLU activation (Shazeer, arXiv 2002.05202) fused with quantization to float8 e4m3."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor, Tolerance, full, uniform
from fastkernels.overrides.kit.fp8 import (
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


def reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    """x: [..., 2 * d], gate then up. Returns (values [..., d] in float8 e4m3, scales in float32).

    Bit-identical to quantize_fp8 of silu_and_mul's output, which is rounded to x's dtype. Scales are one given value
    (scales [1]), one per token (group_size -1; [..., 1]) or one per group of columns ([..., d / group_size]). The other
    arguments are quantize_fp8's. A float64 x gives float64 values that are not rounded.
    """
    d = x.shape[-1] // 2
    y = F.silu(x[..., :d]) * x[..., d:]
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    values, scales = quantize_rows(y, scale, group_size, scale_ub, min_absmax, scale_ue8m0)
    return values, column_major(scales, column_major_scales)


@triton.jit(do_not_specialize=["total", "s_col"])
def _silu_quant_kernel(
    x_ptr, scale_ptr, ub_ptr, q_ptr, s_ptr, x_stride0, x_stride1, n_inner, total, n_groups, group_size, D, s_row,
    s_col, min_absmax, STATIC: tl.constexpr, HAS_UB: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A program processes GROUPS consecutive groups of columns, which may span rows. With a given scale, a group is only
    # a block of columns.
    at = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, group = at // n_groups, at % n_groups
    lanes = tl.arange(0, BLOCK)
    cols = (group * group_size)[:, None] + lanes[None, :]
    mask = (at < total)[:, None] & (lanes < group_size)[None, :] & (cols < D)
    start = (row // n_inner).to(tl.int64) * x_stride0 + (row % n_inner).to(tl.int64) * x_stride1
    x_at = x_ptr + start[:, None] + cols
    gate = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_at + D, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = (silu * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    q_at = q_ptr + row.to(tl.int64)[:, None] * D + cols
    if STATIC:
        scale = tl.load(scale_ptr).to(tl.float32)
        tl.store(q_at, to_fp8(y * fp8_inverse(scale)), mask=mask)
        if tl.program_id(0) == 0:
            tl.store(s_ptr, scale)
    else:
        absmax = tl.max(tl.abs(y), axis=1)
        if HAS_UB:
            absmax = tl.minimum(absmax, tl.load(ub_ptr).to(tl.float32))
        scales = fp8_scale(absmax, min_absmax, UE8M0)
        tl.store(q_at, to_fp8(y * fp8_inverse(scales)[:, None]), mask=mask)
        tl.store(s_ptr + row.to(tl.int64) * s_row + group.to(tl.int64) * s_col, scales, mask=at < total)


def _check(x: torch.Tensor, scale: torch.Tensor | None, group_size: int) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_mul_quant_fp8: x must be [..., 2 * d], got shape {tuple(x.shape)}")
    if scale is None and group_size == 0:
        raise ValueError("silu_mul_quant_fp8: a scale for the whole tensor must be given")
    check("silu_mul_quant_fp8", x.shape[-1] // 2, scale, group_size)


def _supports_triton(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> str | None:
    if scale is None and (x.shape[-1] // 2 if group_size < 0 else group_size) > MAX_COLUMNS:
        return f"a group of {x.shape[-1] // 2} columns is over {MAX_COLUMNS}"
    if scale is None and column_major_scales and x.dim() != 2:
        return f"column-major scales of x with {x.dim()} dimensions"
    if x.numel() >= 1 << 31:
        return f"{x.numel()} values are 2^31 or more"
    return fp8_refusal(x.device) or unsupported_rows(x)


def _triton(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    _check(x, scale, group_size)
    d = x.shape[-1] // 2
    q, s = empty_outputs(
        (*x.shape[:-1], d), x.device, scale is not None, group_size, column_major_scales, False
    )
    if q.numel() == 0:
        return q, s if scale is None else s.copy_(scale)
    n_inner, stride0, stride1 = rows(x) or (1, 0, 0)
    n_rows = q.numel() // d
    if scale is not None:
        width = min(next_power_of_2(d), 1024)
    else:
        width = group_size if group_size > 0 else d
    n_groups = cdiv(d, width)
    total = n_rows * n_groups
    block = next_power_of_2(width)
    # A tile of 2048 gates and 2048 ups; few groups are first spread over an H200's 132 multiprocessors.
    groups = max(1, min(2048 // block, next_power_of_2(cdiv(total, 512))))
    s_row, s_col = s.stride() if s.dim() == 2 else (n_groups, 1)
    grid = (cdiv(total, groups),)
    launch_kernel(
        _silu_quant_kernel, grid,
        x, scale, scale_ub, q, s, stride0, stride1, n_inner, total, n_groups, width, d, s_row, s_col, min_absmax,
        STATIC=scale is not None, HAS_UB=scale_ub is not None, UE8M0=scale_ue8m0, GROUPS=groups, BLOCK=block,
        num_warps=min(max(groups * block // 512, 1), 16),
    )  # fmt: skip
    return q, s


def _reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    _check(x, scale, group_size)
    found = reference(x, scale, group_size, scale_ub, min_absmax, column_major_scales, scale_ue8m0)
    return laid_out(found, scale is not None, group_size, column_major_scales, False)


def _fake(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> ValuesAndScales:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return empty_outputs(shape, x.device, scale is not None, group_size, column_major_scales, False)


silu_mul_quant_fp8 = define(
    "silu_mul_quant_fp8(Tensor x, Tensor? scale=None, int group_size=-1, Tensor? scale_ub=None,"
    " float min_absmax=0.001953125, bool column_major_scales=False, bool scale_ue8m0=False) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0


def _gates_shut(args: list[Any]) -> None:
    args[0][..., : args[0].shape[-1] // 2] = -200.0


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1.0, **dims: Any) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="silu_mul_quant_fp8",
    level=1,
    by_default=True,
    reference=reference,
    op=silu_mul_quant_fp8,
    cases=(
        _case("static_32", "model", weight=32, tokens=32, d=14336, static=True),
        _case("static_8k", "model", tokens=8192, d=14336, static=True),
        _case("token_32", "model", weight=32, tokens=32, d=14336, group=-1),
        _case("token_8k", "model", tokens=8192, d=14336, group=-1),
        _case("deepseek_32", "model", weight=61, tokens=256, d=2048, group=128),
        _case("deepseek_4k", "model", tokens=32768, d=2048, group=128, column_major=True),
        _case("token_63", "odd", tokens=63, d=1000),
        _case("one", "odd", "float32", tokens=1, d=1),
        _case("static_odd", "odd", tokens=5, d=1128, static=True),
        _case("static_strided", "odd", "float16", tokens=7, d=130, static=True, pad=6),
        _case("group_63", "odd", tokens=63, d=384, group=128),
        _case("group_48", "odd", "float16", tokens=5, d=240, group=48, column_major=True),
        _case("upper_bound", "odd", "float32", tokens=9, d=576, upper_bound=True),
        # Powers of two only in float32: a rounding difference in the last bit can double a scale.
        _case("ue8m0", "odd", "float32", tokens=19, d=512, group=128, ue8m0=True),
        _case("heads", "odd", tokens=3, inner=5, d=64, group=32),
        _case("no_token", "odd", tokens=0, d=256, group=128),
        _case("no_row", "odd", tokens=0, d=256, static=True),
    ),
    arguments=(
        Tensor("x", "tokens inner? 2*d", std=2, pad="pad"),
        Tensor("scale", "1", "float32", when="static", values=uniform(0.01, 0.03), bytes="0"),
        Scalar("group_size", "group", default=-1, stated=True),
        Tensor("scale_ub", "1", "float32", when="upper_bound", values=full(5.0), bytes="0"),
        Scalar("min_absmax", value=f"{MIN_ABSMAX}"),
        Scalar("column_major_scales", "column_major", default=False),
        Scalar("scale_ue8m0", "ue8m0", default=False),
    ),
    outputs=(
        Tensor("values", "tokens inner? d", "float8_e4m3fn"),
        Tensor("scales", {"static": "1", "": "tokens inner? groups"}, "float32"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "inner": Axis.count(),
        "d": Axis.width(),
        "groups": Axis(Expr("1 if group < 0 else d // group")),
    },
    constraints=("group < 0 or d % group == 0",),
    flops="8 * tokens * inner * d",
    # Values: half a float8 step, plus the effects of two roundings to 16 bits and of the scale's rounding.
    tolerance={
        "float32": Tolerance(0.0, 1e-6),
        "float16": Tolerance(0.0, 2e-3),
        "bfloat16": Tolerance(0.0, 1.6e-2),
        "float8_e4m3fn": Tolerance(1.1e-3, 0.08),
    },
    extremes={"zero_tokens": _zero_tokens, "gates_shut": _gates_shut},
)
