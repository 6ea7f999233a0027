"""T5's layer normalization, without mean and bias: y = x / sqrt(mean(x^2) + eps) * w (arXiv 1910.10683)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows, unsupported_vector


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., H]; weight: [H]. Returns x's shape in weight's dtype: rounded to it before the product, and after.

    Computed in at least float32. It equals rms_norm if x and weight have the same dtype. T5 in float16 keeps some
    projections in float32, and with them x; the norm converts back.
    """
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    y = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps)
    return y.to(weight.dtype) * weight


@triton.jit
def _t5_layer_norm_kernel(
    x_ptr, w_ptr, out_ptr, n_inner, stride0, stride1, H, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row, which is loaded once.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    h = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=inside, other=0.0)
    y = (h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)).to(w.dtype)
    out = y.to(tl.float32) * w.to(tl.float32)
    tl.store(out_ptr + row * H + cols, out.to(w.dtype), mask=inside)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"t5_layer_norm: weight {tuple(weight.shape)} is not for x {tuple(x.shape)}")


def _fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=weight.dtype, device=x.device)


def _supports_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
    if x.shape[-1] > 65536:
        return f"hidden size {x.shape[-1]} is over 65536"
    return unsupported_rows(x) or unsupported_vector(weight, "weight")


def _triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check(x, weight)
    out, found = _fake(x, weight, eps), rows(x)
    if out.numel() == 0:
        return out
    assert found is not None, x.stride()
    hidden = x.shape[-1]
    block = next_power_of_2(hidden)
    grid = (x.numel() // hidden,)
    launch_kernel(
        _t5_layer_norm_kernel, grid,
        x, weight, out, *found, hidden, eps, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    _check(x, weight)
    return reference(x, weight, eps).contiguous()


t5_layer_norm = define(
    "t5_layer_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="t5_layer_norm",
    level=1,
    by_default=True,
    reference=reference,
    op=t5_layer_norm,
    cases=(  # T5 v1.1 XXL: the text encoder of diffusion models on 512 tokens, and a decoder of 8 sequences
        Case("text_1", {"tokens": 1, "inner": 512, "hidden": 4096}, weight=49, tags=("model",)),
        Case("texts_8", {"tokens": 8, "inner": 512, "hidden": 4096}, weight=49, tags=("model",)),
        Case("decode_8", {"tokens": 8, "inner": 1, "hidden": 4096}, weight=73, tags=("model",)),
        Case(
            "kept_in_float32",
            {"tokens": 8, "inner": 512, "hidden": 2048, "x_dtype": "float32"},
            "float16",
            weight=24,
            tags=("model",),
        ),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("batched", {"tokens": 3, "inner": 5, "hidden": 63}, "float32", tags=("odd",)),
        Case(
            "wide_x", {"tokens": 2, "inner": 3, "hidden": 129, "x_dtype": "float32"}, "float16", tags=("odd",)
        ),
        Case("wide_weight", {"tokens": 7, "hidden": 576, "x_dtype": "float16"}, "float32", tags=("odd",)),
        Case("half", {"tokens": 2, "inner": 9, "hidden": 65}, tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens inner? hidden", "x_dtype"),
        Tensor("weight", "hidden", mean=1, std=0.1),
        Scalar("eps", default=1e-6),
    ),
    outputs=(Tensor("out", "tokens inner? hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "inner": Axis.count(),
        "hidden": Axis.width(),
        "x_dtype": Axis.dtype(Expr("dtype")),
    },
    constructor={"hidden_size": "hidden"},
    flops="4 * tokens * inner * hidden",
    batch_invariant=True,  # one program per row, whose tile depends on the hidden size
)
