"""The next estimate of boxes from the last: y = sigmoid(delta + logit(x)) (Deformable DETR, arXiv 2010.04159)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, uniform
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

TILE = 512  # numbers of a program


def reference(boxes: torch.Tensor, delta: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """boxes: [..., 4] from 0 to 1; delta: the same shape. Returns the new boxes in boxes' dtype.

    logit(x) is log(max(x, eps) / max(1 - x, eps)) of x between 0 and 1. Computed in at least float32.
    """
    _check(boxes, delta)
    acc = torch.promote_types(torch.promote_types(boxes.dtype, delta.dtype), torch.float32)
    x = boxes.to(acc).clamp(0, 1)
    return torch.sigmoid(delta.to(acc) + torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))).to(boxes.dtype)


def _check(boxes: torch.Tensor, delta: torch.Tensor) -> None:
    if boxes.shape != delta.shape or boxes.shape[-1:] != (4,):
        raise ValueError(
            f"refine_boxes: boxes and delta must both be [..., 4], got {tuple(boxes.shape)}, {tuple(delta.shape)}"
        )


@triton.jit(do_not_specialize=["n"])
def _refine_boxes_kernel(x_ptr, delta_ptr, out_ptr, n, eps, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    x = tl.load(x_ptr + at, mask=known, other=0.5).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, tl.where(x > 1.0, 1.0, x))  # NaN propagates, which tl.maximum does not promise
    near, far = tl.where(x < eps, eps, x), tl.where(1.0 - x < eps, eps, 1.0 - x)
    y = tl.load(delta_ptr + at, mask=known, other=0.0).to(tl.float32) + tl.log(near / far)
    tl.store(out_ptr + at, (1.0 / (1.0 + tl.exp(-y))).to(out_ptr.dtype.element_ty), mask=known)


def _triton(boxes: torch.Tensor, delta: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    _check(boxes, delta)
    out = torch.empty(boxes.shape, dtype=boxes.dtype, device=boxes.device)
    if out.numel():
        launch_kernel(
            _refine_boxes_kernel, (cdiv(out.numel(), TILE),), boxes.contiguous(), delta.contiguous(), out, out.numel(),
            eps, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out


def _supports_triton(boxes: torch.Tensor, delta: torch.Tensor, *_: object) -> str | None:
    wrong = [t.dtype for t in (boxes, delta) if t.dtype not in FLOATS]
    return f"boxes or delta has dtype {wrong[0]}, not float16, bfloat16 or float32" if wrong else None


refine_boxes = define(
    "refine_boxes(Tensor boxes, Tensor delta, float eps=1e-5) -> Tensor",
    fake=lambda boxes, *_, **__: torch.empty(boxes.shape, dtype=boxes.dtype, device=boxes.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: object) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="refine_boxes",
    level=1,
    reference=reference,
    op=refine_boxes,
    cases=(  # RT-DETRv2: six decoder layers with 300 queries
        _case("rt_detr_32", "model", weight=6, batch=32, queries=300),
        _case("rt_detr_1", "model", weight=6, batch=1, queries=300),
        _case("one", "odd", "float32", batch=1, queries=1),
        _case("odd_63", "odd", "float32", batch=3, queries=63),
        _case("half", "odd", "float16", batch=2, queries=7, held="float16"),
        _case("wide", "odd", "float16", batch=5, queries=1000),
        _case("eps", "odd", "float32", batch=2, queries=31, eps=1e-3),
        _case("many", "odd", batch=9, queries=17),
    ),
    arguments=(
        Tensor("boxes", "batch queries 4", "held", values=uniform(-0.05, 1.05)),
        Tensor("delta", "batch queries 4"),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("out", "batch queries 4", "held"),),
    axes={
        "batch": Axis.per_call(),
        "queries": Axis.count(),
        "held": Axis.dtype("float32"),
    },
    flops="40 * batch * queries",
)
