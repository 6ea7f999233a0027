"""Gemma's root mean square normalization, y = x / sqrt(mean(x^2) + eps) * (1 + w) (Gemma Team, arXiv 2403.08295)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows, unsupported_vector
from fastkernels.overrides.norm.cases import cancel
from fastkernels.overrides.norm.rms_norm_heads import twice


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x, residual: [..., H]; weight: [H]. Returns (out, residual + x or None), in x's dtype.

    1 + weight and the product with it are in at least float32; the result is rounded once.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    h = x.to(acc) if residual is None else x.to(acc) + residual.to(acc)
    y = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps) * (1 + weight.to(acc))
    return y.to(x.dtype), None if residual is None else h.to(residual.dtype)


@triton.jit
def _gemma_rms_norm_kernel(
    x_ptr, res_ptr, w_ptr, out_ptr, n_inner, x_stride0, x_stride1, res_inner, res_stride0, res_stride1, H, eps,
    HAS_RES: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    keep: tl.constexpr = "evict_last" if TWICE else ""
    # One program per row.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x_at = x_ptr + (row // n_inner) * x_stride0 + (row % n_inner) * x_stride1
    x = tl.load(x_at + cols, mask=inside, other=0.0, eviction_policy=keep)
    weight = 1.0 + tl.load(w_ptr + cols, mask=inside, other=0.0).to(
        tl.float32
    )  # loaded early, as in rms_norm
    h = x.to(tl.float32)
    if HAS_RES:
        res_at = res_ptr + (row // res_inner) * res_stride0 + (row % res_inner) * res_stride1
        res = tl.load(res_at + cols, mask=inside, other=0.0, eviction_policy=keep)
        h += res.to(tl.float32)
        if not TWICE:
            tl.store(res_at + cols, h.to(res.dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / H + eps)
    if TWICE:  # from the cache: see rms_norm_heads.twice
        h = tl.load(x_at + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if HAS_RES:
            h += tl.load(res_at + cols, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out_ptr + row * H + cols, (h * scale * weight).to(x.dtype), mask=inside)
    if HAS_RES and TWICE:
        tl.store(res_at + cols, h.to(res.dtype), mask=inside)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"gemma_rms_norm: weight {tuple(weight.shape)} is not for x {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"gemma_rms_norm: residual {tuple(residual.shape)} is not for x {tuple(x.shape)}")


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> str | None:
    if x.shape[-1] > 65536:
        return f"hidden size {x.shape[-1]} is over 65536"
    return (
        unsupported_rows(x) or unsupported_vector(weight, "weight") or unsupported_rows(residual, "residual")
    )


def _triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    _check(x, weight, residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x_rows, res_rows = rows(x), rows(x if residual is None else residual)
    assert x_rows is not None and res_rows is not None, (x.stride(), residual)
    block = next_power_of_2(x.shape[-1])
    count = x.numel() // x.shape[-1]
    again = twice(count, block)
    launch_kernel(
        _gemma_rms_norm_kernel, (count,),
        x, residual, weight, out, *x_rows, *res_rows, x.shape[-1], eps, HAS_RES=residual is not None,
        BLOCK=block, TWICE=again, num_warps=min(max(block // (256 if again else 512), 1), 16),
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    _check(x, weight, residual)
    out, new = reference(x, weight, eps, residual)
    if residual is not None and new is not None:
        residual.copy_(new)
    return out.contiguous()


gemma_rms_norm = define(
    "gemma_rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None) -> Tensor",
    fake=lambda x, weight, eps, residual=None: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="gemma_rms_norm",
    level=1,
    by_default=True,
    reference=reference,
    op=gemma_rms_norm,
    cases=(  # Gemma 2 9B: four per layer, two of them with a residual; Gemma 3 12B: queries and keys
        Case("decode_1", {"tokens": 1, "hidden": 3584, "residual": True}, weight=84, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 3584, "residual": True}, weight=84, tags=("model",)),
        Case("decode_32_alone", {"tokens": 32, "hidden": 3584}, weight=84, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "hidden": 3584, "residual": True}, weight=2, tags=("model",)),
        Case("qk_norm", {"tokens": 32, "heads": 16, "hidden": 256}, weight=48, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000, "residual": True}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, dtype="float16", tags=("odd",)),
        Case("qk_odd", {"tokens": 5, "heads": 9, "hidden": 64}, tags=("odd",)),
        Case("wide", {"tokens": 7, "hidden": 576, "residual": True}, dtype="float32", tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens heads? hidden"),
        Tensor("weight", "hidden", std=0.1),
        Scalar("eps", default=1e-5),
        Tensor("residual", "tokens heads? hidden", when="residual", mutated=True),
    ),
    outputs=(Tensor("out", "tokens heads? hidden"),),
    axes={"tokens": Axis.per_call(), "heads": Axis.count(), "hidden": Axis.width()},
    constructor={"hidden_size": "hidden", "dim": "hidden"},
    flops="4 * tokens * heads * hidden + hidden",
    activations=("x", "residual"),
    extremes={"cancelled": cancel},
    batch_invariant=True,  # one program per row
)
