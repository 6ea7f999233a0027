"""Root mean square layer normalization, y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows
from fastkernels.overrides.norm import rms_norm_cpp
from fastkernels.overrides.norm.cases import cancel
from fastkernels.overrides.norm.rms_norm_heads import WIDEST, launch_heads, twice


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None,
    cast_x_before_out_mul: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x, residual: [..., H]; weight: [H] or None. Returns (out, residual + x or None), in x's dtype.

    var_hidden_size: number of leading channels that the mean of squares is taken over; None: all.
    cast_x_before_out_mul: round to x's dtype before the product with the weight, and after it (transformers);
    otherwise after it alone (SGLang, and vLLM's compiled code).
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    if residual is not None:
        h = h + residual.to(acc)
        residual = h.to(residual.dtype)
    head = h if var_hidden_size is None else h[..., :var_hidden_size]
    y = h * torch.rsqrt(head.pow(2).mean(dim=-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype), residual
    if cast_x_before_out_mul:
        return (y.to(x.dtype) * weight).to(x.dtype), residual
    return (y * weight.to(acc)).to(x.dtype), residual


@triton.jit
def _rms_norm_kernel(
    x_ptr, res_ptr, w_ptr, out_ptr, x_stride0, x_stride1, res_stride0, res_stride1, n_inner, H, H_VAR, eps,
    HAS_RES: tl.constexpr, HAS_W: tl.constexpr, CAST_FIRST: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    TWICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    keep: tl.constexpr = "evict_last" if TWICE else ""
    # One program per row x[outer, inner, :], so that q/k heads inside a packed qkv need no copy. H and strides are in
    # UNITs: Triton only detects arguments that 16 divides, and multiples of 8 are enough for 16-byte loads.
    row = tl.program_id(0).to(tl.int64)
    outer, inner = row // n_inner, row % n_inner
    cols = tl.arange(0, BLOCK)
    mask = cols < H * UNIT
    x_at = x_ptr + outer * (x_stride0 * UNIT) + inner * (x_stride1 * UNIT) + cols
    h = tl.load(x_at, mask=mask, other=0.0, eviction_policy=keep)
    if HAS_W:  # loaded with x: the compiler moves no load across the store and the reduction's barriers
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    h = h.to(tl.float32)
    if HAS_RES:
        res_at = res_ptr + outer * (res_stride0 * UNIT) + inner * (res_stride1 * UNIT) + cols
        h += tl.load(res_at, mask=mask, other=0.0, eviction_policy=keep).to(tl.float32)
        if not TWICE:
            tl.store(res_at, h.to(res_ptr.dtype.element_ty), mask=mask)
    squares = tl.where(cols < H_VAR, h * h, 0.0)
    y = tl.rsqrt(tl.sum(squares, axis=0) / H_VAR + eps)
    if TWICE:  # from the cache
        h = tl.load(x_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if HAS_RES:
            h += tl.load(res_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y *= h
    if HAS_W:
        if CAST_FIRST:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y *= w
    tl.store(out_ptr + row * (H * UNIT) + cols, y.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_RES and TWICE:
        tl.store(res_at, h.to(res_ptr.dtype.element_ty), mask=mask)


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None, *_: Any
) -> str | None:
    if x.shape[-1] > 65536:
        return f"hidden size {x.shape[-1]} is over 65536"
    if weight is not None and not weight.is_contiguous():
        return f"weight has strides {tuple(weight.stride())}, not contiguous"
    for name, t in (("x", x), ("residual", residual)):
        if t is not None and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if x.dim() > 3 and (rows(x) is None or (residual is not None and residual.stride() != x.stride())):
        return f"x has strides {tuple(x.stride())}: rows need at most two, the same in the residual"
    return None


def _triton(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None, cast_x_before_out_mul: bool = True,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    count = x.numel() // hidden
    if count == 0:
        return out
    n_inner, x0, x1 = rows(x) or (1, 0, 0)
    _, r0, r1 = (rows(residual) or (1, 0, 0)) if residual is not None else (1, 0, 0)
    block = next_power_of_2(hidden)
    how = {"HAS_RES": residual is not None, "HAS_W": weight is not None, "CAST_FIRST": cast_x_before_out_mul}
    tensors, variance = (x, residual, weight, out), (var_hidden_size or hidden, eps)
    if block <= WIDEST:
        launch_heads(count, (*tensors, x0, x1, r0, r1, n_inner), (hidden, *variance), how, block)
        return out
    unit = math.gcd(8, hidden, x0, x1, r0, r1)
    again = unit == 8 and twice(count, block)
    # Unaligned rows are loaded element by element: more threads with fewer elements each.
    each = 256 if again else 512 if unit == 8 else 128
    launch_kernel(
        _rms_norm_kernel, (count,), *tensors, x0 // unit, x1 // unit, r0 // unit, r1 // unit, n_inner, hidden // unit,
        *variance, **how, UNIT=unit, BLOCK=block, TWICE=again, num_warps=min(max(block // each, 1), 16),
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None,
    cast_x_before_out_mul: bool = True,
) -> torch.Tensor:
    # The values of `reference` in fewer steps: on a CPU a decode step's norms cost as much as their calls of PyTorch.
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc)
    if residual is not None:
        h = h + residual
        residual.copy_(h)
    if var_hidden_size is None:
        y = F.rms_norm(h, h.shape[-1:], None, eps)
    else:
        y = h * h[..., :var_hidden_size].square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    if weight is None:
        return y.to(x.dtype)
    if cast_x_before_out_mul:
        return (y.to(x.dtype) * weight).to(x.dtype)
    return (y * weight).to(x.dtype)


def _cpp(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    var_hidden_size: int | None = None,
    cast_x_before_out_mul: bool = True,
) -> torch.Tensor:
    args = (x, weight, eps, residual, var_hidden_size, cast_x_before_out_mul)
    out = rms_norm_cpp.normalize(*args)
    return _reference(*args) if out is None else out


rms_norm = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, Tensor(a!)? residual=None, int? var_hidden_size=None,"
    " bool cast_x_before_out_mul=True) -> Tensor",
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("cpp", _cpp, devices=("cpu",), missing=rms_norm_cpp.missing),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="rms_norm",
    level=1,
    by_default=True,
    reference=reference,
    op=rms_norm,
    cases=(
        Case("decode_1", {"tokens": 1, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "hidden": 4096, "residual": True}, weight=1, tags=("model",)),
        Case("first_layer", {"tokens": 32, "hidden": 4096}, weight=1, tags=("model",)),
        Case("qk_norm", {"tokens": 32, "heads": 32, "hidden": 128}, weight=32, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000, "residual": True, "cast_first": True}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, dtype="float16", tags=("odd",)),
        Case("weightless", {"tokens": 7, "hidden": 576, "weightless": True}, tags=("odd",)),
        Case("qk_odd", {"tokens": 5, "heads": 9, "hidden": 64, "cast_first": True}, tags=("odd",)),
        Case("var_hidden", {"tokens": 5, "hidden": 1000, "var_hidden": 640}, dtype="float32", tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens heads? hidden"),
        Tensor("weight", "hidden", when="not weightless", mean=1, std=0.1, bytes="hidden * itemsize(dtype)"),
        Scalar("eps", default=1e-5),
        Tensor("residual", "tokens heads? hidden", when="residual", mutated=True),
        Scalar("var_hidden_size", "var_hidden", default=None),
        Scalar("cast_x_before_out_mul", "cast_first", default=False, stated=True, rounding=True),
    ),
    outputs=(Tensor("out", "tokens heads? hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "hidden": Axis.width(),
        "var_hidden": Axis.width(None),
    },
    constraints=("(var_hidden or 0) <= hidden",),
    constructor={
        "hidden_size": "hidden",
        "dim": "hidden",
        "channels": "hidden",
        "normalized_shape": "hidden",
        "param_shape": "hidden",
        "has_weight": "not weightless",
        "with_scale": "not weightless",
        "elementwise_affine": "not weightless",
        "affine": "not weightless",
        "var_hidden_size": "var_hidden",
    },
    flops="4 * tokens * heads * hidden",
    activations=("x", "residual"),
    extremes={"cancelled": cancel},
    batch_invariant=True,  # one program per row, whose tile depends on the hidden size
)
