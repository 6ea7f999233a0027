"""Root mean square layer normalization (arXiv 1910.07467) fused with quantization to float8 e4m3."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor, Tolerance, full, uniform
from fastkernels.overrides.kit.fp8 import (
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
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, residual: [..., H]; weight: [H]. Returns (values [..., H] in float8 e4m3, scales in float32, new residual).

    Bit-identical to quantize_fp8 of rms_norm's output without cast_x_before_out_mul, which is rounded to x's dtype
    once, after the product with the weight. Scales are one given value (scales [1]), one per token (group_size -1;
    [..., 1]) or one per group of columns ([..., H / group_size]). The new residual is x + residual in the residual's
    dtype. A float64 x gives float64 values that are not rounded.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    if residual is not None:
        h = h + residual.to(acc)
        residual = h.to(residual.dtype)
    y = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps)
    y = (y * weight.to(acc)).to(x.dtype).to(acc)
    values, scales = quantize_rows(y, scale, group_size, scale_ub, min_absmax, False)
    return values, column_major(scales, column_major_scales, tma_aligned_scales), residual


@triton.jit(do_not_specialize=["s_col"])
def _rms_norm_quant_kernel(
    x_ptr, res_ptr, w_ptr, scale_ptr, ub_ptr, q_ptr, s_ptr, x_stride0, x_stride1, res_stride0, res_stride1, n_inner, H,
    s_row, s_col, eps, min_absmax, HAS_RES: tl.constexpr, STATIC: tl.constexpr, HAS_UB: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row, which is loaded once. GROUP: columns that share a scale, 0 for all of them.
    row = tl.program_id(0).to(tl.int64)
    outer, inner = row // n_inner, row % n_inner
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    h = tl.load(x_ptr + outer * x_stride0 + inner * x_stride1 + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RES:
        res_at = res_ptr + outer * res_stride0 + inner * res_stride1 + cols
        h += tl.load(res_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(res_at, h.to(res_ptr.dtype.element_ty), mask=mask)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)
    y = (y * w).to(x_ptr.dtype.element_ty).to(tl.float32)
    if STATIC:
        scale = tl.load(scale_ptr).to(tl.float32)
        q = to_fp8(y * fp8_inverse(scale))
        if row == 0:
            tl.store(s_ptr, scale)
    elif GROUP == 0:
        absmax = tl.max(tl.abs(y), axis=0)
        if HAS_UB:
            absmax = tl.minimum(absmax, tl.load(ub_ptr).to(tl.float32))
        scale = fp8_scale(absmax, min_absmax, False)
        q = to_fp8(y * fp8_inverse(scale))
        tl.store(s_ptr + row * s_row, scale)
    else:
        groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
        absmax = tl.max(tl.abs(groups), axis=1)
        if HAS_UB:
            absmax = tl.minimum(absmax, tl.load(ub_ptr).to(tl.float32))
        scales = fp8_scale(absmax, min_absmax, False)
        q = to_fp8(tl.reshape(groups * fp8_inverse(scales)[:, None], (BLOCK,)))
        at = tl.arange(0, BLOCK // GROUP)
        tl.store(s_ptr + row * s_row + at.to(tl.int64) * s_col, scales, mask=at * GROUP < H)
    tl.store(q_ptr + row * H + cols, q, mask=mask)


def _check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, group_size: int) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm_quant_fp8: weight {tuple(weight.shape)} does not match x {tuple(x.shape)}"
        )
    if scale is None and group_size == 0:
        raise ValueError("rms_norm_quant_fp8: a scale for the whole tensor must be given")
    check("rms_norm_quant_fp8", x.shape[-1], scale, group_size)


def _supports_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    *_: bool,
) -> str | None:
    if x.shape[-1] > 32768:
        return f"hidden size {x.shape[-1]} is over 32768"
    if scale is None and group_size > 0 and group_size & (group_size - 1):
        return f"group_size {group_size} is not a power of two"
    if scale is None and column_major_scales and x.dim() != 2:
        return f"column-major scales of x with {x.dim()} dimensions"
    if residual is not None and (rows(residual) or (1,))[0] != (rows(x) or (1,))[0]:
        return f"residual has strides {residual.stride()}, x {x.stride()}: their rows differ"
    if (reason := fp8_refusal(x.device)) is not None:
        return reason
    return unsupported_rows(x) or unsupported_rows(weight, "weight") or unsupported_rows(residual, "residual")


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    *layout: bool,
) -> ValuesAndScales:
    _check(x, weight, scale, group_size)
    q, s = empty_outputs(x.shape, x.device, scale is not None, group_size, *layout)
    hidden = x.shape[-1]
    if x.numel() == 0:
        return q, s if scale is None else s.copy_(scale)
    n_inner, x0, x1 = rows(x) or (1, 0, 0)
    _, r0, r1 = (rows(residual) or (1, 0, 0)) if residual is not None else (1, 0, 0)
    group = max(group_size, 0) if scale is None else 0
    block = max(next_power_of_2(hidden), group)
    s_row, s_col = s.stride() if s.dim() == 2 else (s.shape[-1], 1)
    grid = (x.numel() // hidden,)
    launch_kernel(
        _rms_norm_quant_kernel, grid,
        x, residual, weight, scale, scale_ub, q, s, x0, x1, r0, r1, n_inner, hidden, s_row, s_col, eps, min_absmax,
        HAS_RES=residual is not None, STATIC=scale is not None, HAS_UB=scale_ub is not None, GROUP=group,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return q, s


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    *layout: bool,
) -> ValuesAndScales:
    _check(x, weight, scale, group_size)
    *found, new = reference(x, weight, eps, scale, group_size, residual, scale_ub, min_absmax)
    if residual is not None and new is not None:
        residual.copy_(new)
    return laid_out((found[0], found[1]), scale is not None, group_size, *layout)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    *rest: Any,
) -> ValuesAndScales:
    return empty_outputs(x.shape, x.device, scale is not None, group_size, *rest[2:])


rms_norm_quant_fp8 = define(
    "rms_norm_quant_fp8(Tensor x, Tensor weight, float eps, Tensor? scale=None, int group_size=-1,"
    " Tensor(a!)? residual=None, Tensor? scale_ub=None, float min_absmax=0.001953125,"
    " bool column_major_scales=False, bool tma_aligned_scales=False) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0
    if args[5] is not None:
        args[5][::2] = 0


def _zero_weight(args: list[Any]) -> None:
    args[1].zero_()


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1.0, **dims: Any) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_DEEPSEEK: dict[str, Any] = {"hidden": 7168, "group": 128, "residual": True}

SPEC = OpSpec(
    name="rms_norm_quant_fp8",
    level=1,
    by_default=True,
    reference=reference,
    op=rms_norm_quant_fp8,
    cases=(
        _case("static_32", "model", weight=64, tokens=32, hidden=4096, static=True, residual=True),
        _case("token_1", "model", weight=64, tokens=1, hidden=4096, residual=True),
        _case("token_32", "model", weight=64, tokens=32, hidden=4096, residual=True),
        _case("token_8k", "model", tokens=8192, hidden=4096, residual=True),
        _case("deepseek_32", "model", weight=61, tokens=32, **_DEEPSEEK),
        _case("deepseek_4k", "model", tokens=4096, column_major=True, tma_aligned=True, **_DEEPSEEK),
        _case("token_63", "odd", tokens=63, hidden=1000, residual=True),
        _case("one", "odd", "float32", tokens=1, hidden=1),
        _case("token_1128", "odd", "float16", tokens=3, hidden=1128),
        _case("strided", "odd", "float32", tokens=5, hidden=130, pad=7, residual=True),
        _case("static_odd", "odd", tokens=7, hidden=577, static=True),
        _case("static_residual", "odd", "float32", tokens=9, hidden=64, static=True, residual=True),
        _case("group_63", "odd", tokens=63, hidden=384, group=128, residual=True),
        _case(
            "column_major",
            "odd",
            "float16",
            tokens=5,
            hidden=192,
            group=64,
            column_major=True,
            tma_aligned=True,
        ),
        _case("upper_bound", "odd", "float32", tokens=9, hidden=1000, upper_bound=True),
        _case("heads", "odd", tokens=3, inner=5, hidden=64, group=32, residual=True),
        _case("no_token", "odd", tokens=0, hidden=256, residual=True),
    ),
    arguments=(
        Tensor("x", "tokens inner? hidden", pad="pad"),
        Tensor("weight", "hidden", mean=1, std=0.1),
        Scalar("eps", default=1e-5),
        Tensor("scale", "1", "float32", when="static", values=uniform(0.005, 0.015), bytes="0"),
        Scalar("group_size", "group", default=-1, stated=True),
        Tensor("residual", "tokens inner? hidden", when="residual", mutated=True, pad="pad"),
        Tensor("scale_ub", "1", "float32", when="upper_bound", values=full(2.0), bytes="0"),
        Scalar("min_absmax", value=f"{MIN_ABSMAX}"),
        Scalar("column_major_scales", "column_major", default=False),
        Scalar("tma_aligned_scales", "tma_aligned", default=False),
    ),
    outputs=(
        Tensor("values", "tokens inner? hidden", "float8_e4m3fn"),
        Tensor("scales", {"static": "1", "": "tokens inner? groups"}, "float32"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "inner": Axis.count(),
        "hidden": Axis.width(),
        "groups": Axis(Expr("1 if group < 0 else hidden // group")),
    },
    constraints=("group < 0 or hidden % group == 0",),
    flops="7 * tokens * inner * hidden",
    # Values: half a float8 step, plus the effects of rounding to 16 bits (twice in a host) and of the scale's rounding.
    tolerance={
        "float32": Tolerance(1e-6, 2e-6),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
        "float8_e4m3fn": Tolerance(1.1e-3, 0.08),
    },
    extremes={"zero_tokens": _zero_tokens, "zero_weight": _zero_weight},
)
