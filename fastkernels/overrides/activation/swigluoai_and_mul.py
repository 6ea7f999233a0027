"""GPT-OSS's clamped SwiGLU, y = g sigmoid(alpha g) (u + 1), of neighbouring pairs (g, u) (arXiv 2508.10925)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Scalar
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

ALPHA, LIMIT = 1.702, 7.0


def reference(x: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> torch.Tensor:
    """x: [..., 2 * d], each gate next to its up value. Returns [..., d] in x's dtype.

    The gate is at most `limit`, the up value between -limit and limit. Computed in at least float32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide[..., ::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


@triton.jit
def gated(gate, up, alpha, limit):
    """The result of float32 values, for kernels that have both of a pair."""
    gate = tl.where(gate > limit, limit, gate)  # not tl.minimum, which may drop a NaN
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit(do_not_specialize=["n"])
def _swigluoai_and_mul_kernel(x_ptr, out_ptr, n, alpha, limit, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    gate = tl.load(x_ptr + 2 * at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + 2 * at + 1, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, gated(gate, up, alpha, limit).to(out_ptr.dtype.element_ty), mask=at < n)


def _check(x: torch.Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"swigluoai_and_mul: x must be [..., 2 * d], got shape {tuple(x.shape)}")


def _supports_triton(x: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {x.dtype} is not float16, bfloat16 or float32"
    return None if x.is_contiguous() else f"x has strides {tuple(x.stride())}: it must be contiguous"


def _triton(x: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> torch.Tensor:
    _check(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if out.numel():
        n, tile = out.numel(), elementwise.TILE
        launch_kernel(
            _swigluoai_and_mul_kernel, (cdiv(n, tile),), x, out, n, alpha, limit, TILE=tile, num_warps=4
        )
    return out


def _reference(x: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> torch.Tensor:
    _check(x)
    return reference(x, alpha, limit)


def _fake(x: torch.Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


swigluoai_and_mul = define(
    "swigluoai_and_mul(Tensor x, float alpha=1.702, float limit=7.0) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="swigluoai_and_mul",
    level=1,
    reference=reference,
    op=swigluoai_and_mul,
    cases=(  # the four experts of each token
        Case("decode_1", {"tokens": 4, "d": 2880}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 128, "d": 2880}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 32768, "d": 2880}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "d": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "d": 1000}, tags=("odd",)),
        Case("odd_1025", {"tokens": 3, "d": 1025}, "float16", tags=("odd",)),
        Case("batched", {"tokens": 2, "inner": 7, "d": 63}, "float32", tags=("odd",)),
        Case("narrow", {"tokens": 130, "d": 7}, tags=("odd",)),
        Case("tight", {"tokens": 5, "d": 129, "alpha": 1.0, "limit": 0.5}, "float32", tags=("odd",)),
    ),
    arguments=(elementwise.PAIR, Scalar("alpha", default=ALPHA), Scalar("limit", default=LIMIT)),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="9 * tokens * inner * d",
)
