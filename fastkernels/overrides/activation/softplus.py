"""Softplus activation, y = log(1 + exp(beta x)) / beta, of the time steps of Mamba and gated delta nets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Scalar
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.overlap import follow
from fastkernels.overrides.kit.rows import unsupported_rows


def reference(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """x: [..., d]. Computed in at least float32; x itself where beta * x is over the threshold. Returns x's dtype."""
    return F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)), beta, threshold).to(x.dtype)


@triton.jit(do_not_specialize=["n_tiles"])
def _softplus_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_tiles, beta, threshold, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)
    cols = (pid % n_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    x = tl.load(x_at, mask=cols < D, other=0.0).to(tl.float32)
    e = tl.exp(tl.minimum(beta * x, threshold))
    u = 1.0 + e  # log(1 + e) = log(u) e / (u - 1): the quotient cancels the rounding of u
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    y = tl.where(beta * x > threshold, x, log1p / beta)
    y = tl.where(x == x, y, x)  # minimum may drop a NaN
    tl.store(out_ptr + row * D + cols, y.to(out_ptr.dtype.element_ty), mask=cols < D)


def _triton(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    return elementwise.launch(_softplus_kernel, x, beta=beta, threshold=threshold)


softplus = define(
    "softplus(Tensor x, float beta=1.0, float threshold=20.0) -> Tensor",
    fake=elementwise.like,
    providers=(
        Provider("triton", _triton, supports=lambda x, *_: unsupported_rows(x)),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)

SPEC = OpSpec(
    name="softplus",
    level=1,
    reference=reference,
    op=softplus,
    arguments=(elementwise.X, Scalar("beta", default=1.0), Scalar("threshold", default=20.0)),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="4 * tokens * inner * d",
    cases=(  # Qwen3-Next 80B's 32 value heads; the 8192 channels of Falcon Mamba 7B
        Case("heads_32", {"tokens": 32, "d": 32}, weight=36, tags=("model",)),
        Case("decode_32", {"tokens": 32, "d": 8192}, weight=64, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "d": 8192}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "d": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "d": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "d": 1128, "beta": 2.0}, "float16", tags=("odd",)),
        Case("low_threshold", {"tokens": 5, "d": 257, "threshold": 1.5}, "float32", tags=("odd",)),
        Case("batched", {"tokens": 2, "inner": 7, "d": 63, "beta": 0.5}, "float32", tags=("odd",)),
        Case("batched_half", {"tokens": 5, "inner": 3, "d": 129}, tags=("odd",)),
        Case("wide", {"tokens": 2, "d": 5001}, "float16", tags=("odd",)),
    ),
)
