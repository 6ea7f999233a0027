"""SwiGLU activation (Shazeer, arXiv 2002.05202), quantized to float8 e4m3 before it leaves the processor."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import drawn, rows_of, varied
from fastkernels.core.spec import Case, OpSpec, Target, Tolerance
from fastkernels.overrides.kit.fp8 import (
    FP8,
    MAX_COLUMNS,
    MIN_ABSMAX,
    Pair,
    check,
    empty_outputs,
    fp8_inverse,
    fp8_scale,
    laid_out,
    quantize_rows,
    refuse,
    to_fp8,
    written,
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
) -> Pair:
    """x: [..., 2 * d], gate then up. Returns (values [..., d] in float8 e4m3, scales in float32).

    To the bit what quantize_fp8 makes of silu_and_mul's output, which is rounded to x's dtype: with one given scale
    (scales [1]), with one for each token (group_size -1; [..., 1]) or for each so many columns ([..., d / group_size]).
    The other arguments are quantize_fp8's. A float64 x gives float64 values that are not rounded.
    """
    d = x.shape[-1] // 2
    y = F.silu(x[..., :d]) * x[..., d:]
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return quantize_rows(y, scale, group_size, scale_ub, min_absmax, scale_ue8m0)


@triton.jit(do_not_specialize=["total", "s_col"])
def _silu_quant_kernel(
    x_ptr, scale_ptr, ub_ptr, q_ptr, s_ptr, x_stride0, x_stride1, n_inner, total, n_groups, group_size, D, s_row,
    s_col, min_absmax, STATIC: tl.constexpr, HAS_UB: tl.constexpr, UE8M0: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A program has GROUPS groups of columns, side by side in a row or in the next one; under a given scale a group
    # is only a block of columns.
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
        raise ValueError("silu_mul_quant_fp8: one scale for the whole tensor must be given")
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
    return unsupported_rows(x)


def _triton(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> Pair:
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
    # A tile of 2048 gates and as many ups; few groups are spread over an H200's 132 processors first.
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
) -> Pair:
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
) -> Pair:
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


def vllm_silu_and_mul_per_block_quant(
    input: torch.Tensor,
    group_size: int,
    quant_dtype: torch.dtype,
    scale_ub: torch.Tensor | None = None,
    is_scale_transposed: bool = False,
) -> Pair:
    """vllm._custom_ops.silu_and_mul_per_block_quant, float8 e4m3 only: input [T, 2 * d] -> (values, scales).

    Raises ValueError for another quant_dtype.
    """
    refuse("silu_and_mul_per_block_quant", quant_dtype=None if quant_dtype == FP8 else quant_dtype)
    return silu_mul_quant_fp8(input, None, group_size, scale_ub, MIN_ABSMAX, is_scale_transposed)


def vllm_silu_mul_per_token_group_quant_fp8_colmajor_0_26(
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 1e-10,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Pair:
    """vllm...quantization.utils.fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor of 0.26; see that from 0.32."""
    return vllm_silu_mul_per_token_group_quant_fp8_colmajor(
        input, output, use_ue8m0, eps, clamp_limit, group_size, alpha, beta
    )


def vllm_silu_mul_per_token_group_quant_fp8_colmajor(
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    eps: float = 1e-10,
    clamp_limit: float | None = None,
    group_size: int = 128,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    expert_ends: torch.Tensor | None = None,
    expert_alignment: int = 0,
) -> Pair:
    """vllm...quantization.utils.fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor from 0.32 on.

    input [T, 2 * d] -> (values [T, d], column-major scales [T, d / group_size]). Any T, where the host needs
    multiples. Raises ValueError for clamp_limit and an activation other than silu. Rows that expert_ends says are
    padding are quantized too, where the host leaves them alone.
    """
    refuse(
        "silu_mul_per_token_group_quant_fp8_colmajor", clamp_limit=clamp_limit,
        alpha=None if alpha == 1.0 else alpha, beta=None if beta == 0.0 else beta,
    )  # fmt: skip
    return written(
        silu_mul_quant_fp8(input, None, group_size, None, eps, True, bool(use_ue8m0)), output, None
    )


def sglang_silu_mul_static_tensorwise_quant_for_cutlass_moe(
    input: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor,
    num_tokens_tensor: torch.Tensor,
    expected_num_tokens: int,
    intermediate_size: int,
) -> None:
    """sglang.kernels.ops.moe.ep_moe_kernels.silu_mul_static_tensorwise_quant_for_cutlass_moe.

    Fills the first num_tokens_tensor rows of output [T, d] from input [T, 2 * d]; expected_num_tokens, which only
    sizes the host's grid, does not count. Raises ValueError for another intermediate_size than d.
    """
    if 2 * intermediate_size != input.shape[-1]:
        raise ValueError(f"intermediate_size {intermediate_size} is not half of {input.shape[-1]} columns")
    q, _ = silu_mul_quant_fp8(input, scale)
    used = torch.arange(input.shape[0], device=input.device)[:, None] < num_tokens_tensor
    output.view(torch.uint8).copy_(torch.where(used, q.view(torch.uint8), output.view(torch.uint8)))


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    width = 2 * d["d"] + d.get("pad", 0)
    shape = (d["tokens"], d["inner"], width) if "inner" in d else (d["tokens"], width)
    x = 2 * torch.randn(*shape, generator=generator, device=device)
    x = x.to(getattr(torch, case.dtype))[..., : 2 * d["d"]]
    scale = torch.rand(1, generator=generator, device=device) * 0.02 + 0.01 if d.get("static") else None
    scale_ub = torch.full((1,), 5.0, device=device) if d.get("upper_bound") else None
    return [
        x,
        scale,
        d.get("group", -1),
        scale_ub,
        MIN_ABSMAX,
        d.get("column_major", False),
        d.get("ue8m0", False),
    ]


def _dims_of(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> dict[str, Any]:
    dims: dict[str, Any] = {**rows_of(x, "inner"), "d": x.shape[-1] // 2, "group": group_size}
    flags = {
        "static": scale is not None, "upper_bound": scale_ub is not None, "column_major": column_major_scales,
        "ue8m0": scale_ue8m0,
    }  # fmt: skip
    return {**dims, **{name: True for name, value in flags.items() if value}}


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new, group = drawn(case, rng, ("tokens", "inner"), ("d",)), max(case.dims.get("group", 1), 1)
        return {**new, "d": max(new["d"] // group, 1) * group}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _bytes(case: Case) -> int:
    d = case.dims
    values = d["tokens"] * d.get("inner", 1) * d["d"]
    group = d.get("group", -1)
    scales = 1 if d.get("static") else values // (d["d"] if group < 0 else group)
    return values * (2 * torch.finfo(getattr(torch, case.dtype)).bits // 8 + 1) + 4 * scales


def _zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0


def _gates_shut(args: list[Any]) -> None:
    args[0][..., : args[0].shape[-1] // 2] = -200.0


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1.0, **dims: Any) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_NOTE = "the hosts' fusion passes and MoE kernels bind the function: for forks and for our engine"
_COLMAJOR = (
    "vllm.model_executor.layers.quantization.utils.fp8_utils:silu_mul_per_token_group_quant_fp8_colmajor"
)
_OURS = "vllm_silu_mul_per_token_group_quant_fp8_colmajor"
_SGLANG = "silu_mul_static_tensorwise_quant_for_cutlass_moe"

SPEC = OpSpec(
    name="silu_mul_quant_fp8",
    level=1,
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
        # Powers of two only in float32: at a rounded value's last bit a scale doubles.
        _case("ue8m0", "odd", "float32", tokens=19, d=512, group=128, ue8m0=True),
        _case("heads", "odd", tokens=3, inner=5, d=64, group=32),
        _case("no_token", "odd", tokens=0, d=256, group=128),
        _case("no_row", "odd", tokens=0, d=256, static=True),
    ),
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=lambda case: 8 * case.dims["tokens"] * case.dims.get("inner", 1) * case.dims["d"],
    # Of values: half a step of float8, and what two roundings to 16 bits and the scale's may move.
    tolerance={
        "float32": Tolerance(0.0, 1e-6),
        "float16": Tolerance(0.0, 2e-3),
        "bfloat16": Tolerance(0.0, 1.6e-2),
        "float8_e4m3fn": Tolerance(1.1e-3, 0.08),
    },
    dims_of=_dims_of,
    vary=_vary,
    extremes={"zero_tokens": _zero_tokens, "gates_shut": _gates_shut},
    targets=(
        Target(
            "vllm",
            "vllm._custom_ops:silu_and_mul_per_block_quant",
            "vllm_silu_and_mul_per_block_quant",
            "function",
            note=_NOTE,
        ),
        Target("vllm", _COLMAJOR, _OURS + "_0_26", "function", "<0.32", note=_NOTE),
        Target("vllm", _COLMAJOR, _OURS, "function", ">=0.32", note=_NOTE),
        Target(
            "sglang",
            f"sglang.kernels.ops.moe.ep_moe_kernels:{_SGLANG}",
            f"sglang_{_SGLANG}",
            "function",
            note=_NOTE,
        ),
    ),
)
