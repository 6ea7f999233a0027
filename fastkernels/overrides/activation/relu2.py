"""Squared ReLU activation, y = max(x, 0)^2 (So et al., arXiv 2109.08668)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.overlap import follow
from fastkernels.overrides.kit.rows import unsupported_rows


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: [..., d]. Computed in at least float32; returns x's shape and dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).relu().square().to(x.dtype)


@triton.jit(do_not_specialize=["n_tiles"])
def _relu2_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_tiles, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)
    cols = (pid % n_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    x = tl.load(x_at, mask=cols < D, other=0.0).to(tl.float32)
    y = tl.where(x < 0.0, 0.0, x)  # not tl.maximum, which may drop a NaN
    tl.store(out_ptr + row * D + cols, (y * y).to(out_ptr.dtype.element_ty), mask=cols < D)


def _triton(x: torch.Tensor) -> torch.Tensor:
    # As fast as a copy with small tiles; larger ones are slower.
    return elementwise.launch(_relu2_kernel, x, large=elementwise.TILE)


def _reference(x: torch.Tensor) -> torch.Tensor:
    return reference(x).contiguous()


relu2 = define(
    "relu2(Tensor x) -> Tensor",
    fake=elementwise.like,
    providers=(
        Provider("triton", _triton, supports=unsupported_rows),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="relu2",
    level=1,
    by_default=True,
    reference=reference,
    op=relu2,
    cases=(  # Nemotron-4 15B, and the experts of Nemotron 3 Nano (six per token)
        Case("decode_1", {"tokens": 1, "d": 24576}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 32, "d": 24576}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "d": 24576}, weight=1, tags=("model",)),
        Case("experts_32", {"tokens": 32, "inner": 6, "d": 1856}, weight=23, tags=("model",)),
        Case("one", {"tokens": 1, "d": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "d": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "d": 1128}, "float16", tags=("odd",)),
        Case("odd_1025", {"tokens": 1, "d": 1025}, tags=("odd",)),
        Case("batched", {"tokens": 2, "inner": 7, "d": 63}, "float32", tags=("odd",)),
        Case("batched_half", {"tokens": 5, "inner": 3, "d": 129}, tags=("odd",)),
        Case("wide", {"tokens": 2, "d": 5001}, "float16", tags=("odd",)),
    ),
    arguments=(elementwise.X,),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="2 * tokens * inner * d",
    batch_invariant=True,  # elementwise
)
