"""A normalized residual branch, and the norms that follow the sum (Gemma Team, arXiv 2408.00118).

Gemma, GLM-4, OLMo 2 and EXAONE 4 normalize a block's output before it is added. This is that norm, the sum, and the
norms before the next block, in one launch. Gemma 4 adds a second branch (experts), and scales the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
WIDEST = 8192  # a program has a row of each tensor in its registers


def reference(
    x: T, residual: T, weight: T, eps: float, offset: float = 0.0, next_weight: T | None = None,
    second_weight: T | None = None, third_weight: T | None = None, factor: float = 1.0, scalar: T | None = None,
    other: T | None = None, other_weight: T | None = None, sum_weight: T | None = None,
) -> tuple[T, T]:  # fmt: skip
    """x, residual, other: [T, H]; weights: [H]; scalar: [1].

    norm(x, w) = x / sqrt(mean(x^2) + eps) * (offset + w). With `other`, the branch is norm(norm(x, weight) +
    norm(other, other_weight), sum_weight), else norm(x, weight). The new residual is (residual + branch) * scalar.
    Returns (out [n, T, H], new residual), in x's dtype: out has the norms of the sum with those of the three last
    weights that are given, the second one times `factor`. All is computed in at least float32 and rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)

    def norm(h: T, w: T) -> T:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (offset + w.to(acc))

    h = norm(x.to(acc), weight)
    if other is not None and other_weight is not None and sum_weight is not None:
        h = norm(h + norm(other.to(acc), other_weight), sum_weight)
    h = residual.to(acc) + h
    if scalar is not None:
        h = h * scalar.to(acc)
    wanted = (next_weight, 1.0), (second_weight, factor), (third_weight, 1.0)
    outs = [(norm(h, w) * f).to(x.dtype) for w, f in wanted if w is not None]
    return torch.stack(outs) if outs else x.new_empty(0, *x.shape), h.to(x.dtype)


@triton.jit
def _unit(h, H, eps):
    return h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)


@triton.jit
def _weight(w_ptr, cols, inside, offset):
    return offset + tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sandwich_norm_kernel(
    x_ptr, res_ptr, w_ptr, next_ptr, second_ptr, third_ptr, scalar_ptr, other_ptr, other_w_ptr, sum_w_ptr, out_ptr,
    x_stride, res_stride, other_stride, plane, H, eps, offset, factor, NEXT: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, SCALAR: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    w = _weight(w_ptr, cols, inside, offset)
    if NEXT:
        w0 = _weight(next_ptr, cols, inside, offset)
    if OTHER:
        other_w, sum_w = _weight(other_w_ptr, cols, inside, offset), _weight(sum_w_ptr, cols, inside, offset)
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    res_at = res_ptr + row * res_stride + cols
    res = tl.load(res_at, mask=inside, other=0.0)
    h = _unit(x.to(tl.float32), H, eps) * w
    if OTHER:
        other = tl.load(other_ptr + row * other_stride + cols, mask=inside, other=0.0).to(tl.float32)
        h = _unit(h + _unit(other, H, eps) * other_w, H, eps) * sum_w
    h += res.to(tl.float32)
    if SCALAR:
        h *= tl.load(scalar_ptr).to(tl.float32)
    tl.store(res_at, h.to(res.dtype), mask=inside)
    out_at = out_ptr + row * H + cols
    if NEXT or SECOND or THIRD:
        y = _unit(h, H, eps)
    if NEXT:
        tl.store(out_at, (y * w0).to(x.dtype), mask=inside)
        out_at += plane
    if SECOND:
        tl.store(out_at, (y * _weight(second_ptr, cols, inside, offset) * factor).to(x.dtype), mask=inside)
        out_at += plane
    if THIRD:
        tl.store(out_at, (y * _weight(third_ptr, cols, inside, offset)).to(x.dtype), mask=inside)


def _check(x: T, residual: T, weights: Sequence[T | None], branch: Sequence[T | None]) -> None:
    """Raise ValueError for arguments that do not match. branch: other, other_weight, sum_weight."""
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"sandwich_norm: x must be [T, H] and the residual like it, got {tuple(x.shape)} {x.dtype} and"
            f" {tuple(residual.shape)} {residual.dtype}"
        )
    other, *more = branch
    if len({t is None for t in branch}) > 1 or (other is not None and other.shape != x.shape):
        raise ValueError(
            "sandwich_norm: other must be like x, and given together with other_weight and sum_weight"
        )
    for w in (*weights, *more):
        if w is not None and w.shape != x.shape[1:]:
            raise ValueError(f"sandwich_norm: weight {tuple(w.shape)} is not for x {tuple(x.shape)}")


def _supports_triton(x: T, *rest: Any) -> str | None:
    if x.shape[-1] > WIDEST:
        return f"hidden size {x.shape[-1]} is over {WIDEST}"
    for t in (x, *rest):
        if isinstance(t, torch.Tensor) and (t.dtype not in FLOATS or t.stride(-1) != 1):
            return f"a tensor of dtype {t.dtype} has strides {tuple(t.stride())}: rows must be contiguous, of floats"
    return None


def _triton(
    x: T, residual: T, weight: T, eps: float, offset: float = 0.0, next_weight: T | None = None,
    second_weight: T | None = None, third_weight: T | None = None, factor: float = 1.0, scalar: T | None = None,
    other: T | None = None, other_weight: T | None = None, sum_weight: T | None = None,
) -> T:  # fmt: skip
    nexts, branch = (next_weight, second_weight, third_weight), (other, other_weight, sum_weight)
    _check(x, residual, (weight, *nexts), branch)
    out = _fake(x, residual, weight, eps, offset, *nexts)
    tokens, hidden = x.shape
    if tokens == 0:
        return out
    block = next_power_of_2(hidden)
    launch_kernel(
        _sandwich_norm_kernel, (tokens,),
        x, residual, weight, *nexts, scalar, *branch, out, x.stride(0), residual.stride(0),
        0 if other is None else other.stride(0), x.numel(), hidden, eps, offset, factor,
        NEXT=next_weight is not None, SECOND=second_weight is not None, THIRD=third_weight is not None,
        SCALAR=scalar is not None, OTHER=other is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


def _reference(x: T, residual: T, *args: Any) -> T:
    given = [*args, *[None] * (11 - len(args))]
    _check(x, residual, (given[0], *given[3:6]), given[8:])
    out, new = reference(x, residual, *args)
    residual.copy_(new)
    return out


def _fake(
    x: T, residual: T, weight: T, eps: float, offset: float = 0.0, next_weight: T | None = None,
    second_weight: T | None = None, third_weight: T | None = None, *_: Any, **__: Any,
) -> T:  # fmt: skip
    return x.new_empty(sum(w is not None for w in (next_weight, second_weight, third_weight)), *x.shape)


sandwich_norm = define(
    "sandwich_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float offset=0.0,"
    " Tensor? next_weight=None, Tensor? second_weight=None, Tensor? third_weight=None, float factor=1.0,"
    " Tensor? scalar=None, Tensor? other=None, Tensor? other_weight=None, Tensor? sum_weight=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tokens: int, hidden: int, tag: str, dtype: str = "bfloat16", weight: int = 1, **more: Any
) -> Case:
    return Case(name, {"tokens": tokens, "hidden": hidden, **more}, dtype, weight, (tag,))


_WEIGHT: dict[str, Any] = {"std": 0.1, "mean": 1}
SPEC = OpSpec(
    name="sandwich_norm",
    level=2,
    reference=reference,
    op=sandwich_norm,
    cases=(  # Gemma 3 12B: two a layer; Gemma 4 26B-A4B: before and after the experts
        _case("gemma3_1", 1, 3840, "model", weight=96, offset=1.0),
        _case("gemma3_32", 32, 3840, "model", weight=96, offset=1.0),
        _case("gemma3_8k", 8192, 3840, "model", offset=1.0),
        _case("gemma4_32_three", 32, 2816, "model", weight=30, second=True, third=True, factor=0.125),
        _case("gemma4_32_experts", 32, 2816, "model", weight=30, other=True, scaled=True),
        _case("one", 1, 1, "odd", "float32"),
        _case("odd_63", 63, 1000, "odd", other=True),
        _case("odd_1128", 3, 1128, "odd", "float16", next=False),
        _case("all", 5, 576, "odd", "float32", second=True, third=True, other=True, scaled=True, offset=1.0),
        _case("none", 0, 64, "odd", second=True),
    ),
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("residual", "tokens hidden", mutated=True),
        Tensor("weight", "hidden", **_WEIGHT),
        Scalar("eps", default=1e-6),
        Scalar("offset", default=0.0),
        Tensor("next_weight", "hidden", when="next", **_WEIGHT),
        Tensor("second_weight", "hidden", when="second", **_WEIGHT),
        Tensor("third_weight", "hidden", when="third", **_WEIGHT),
        Scalar("factor", default=1.0),
        Tensor("scalar", "1", when="scaled", **_WEIGHT),
        Tensor("other", "tokens hidden", when="other"),
        Tensor("other_weight", "hidden", when="other", **_WEIGHT),
        Tensor("sum_weight", "hidden", when="other", **_WEIGHT),
    ),
    outputs=(Tensor("out", "next+second+third tokens hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "next": Axis.option(True, stated=True),
        **{name: Axis.option(False) for name in ("second", "third", "scaled", "other")},
    },
    flops="tokens * hidden * (10 + 5 * (next + second + third) + 10 * other)",
    activations=("residual",),
    batch_invariant=True,  # one program per row
)
