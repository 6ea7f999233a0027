"""Sigmoid approximation of the GELU, y = x * sigmoid(1.702 x) (Hendrycks and Gimpel, arXiv 1606.08415)."""

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
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    # Not torch.sigmoid: on the CPU it rounds the elements after a row's last full vector differently.
    return (h / (1 + torch.exp(-1.702 * h))).to(x.dtype)


@triton.jit(do_not_specialize=["n_tiles"])
def _quick_gelu_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_tiles, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)
    cols = (pid % n_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    x = tl.load(x_at, mask=cols < D, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-1.702 * x))
    tl.store(out_ptr + row * D + cols, y.to(out_ptr.dtype.element_ty), mask=cols < D)


def _triton(x: torch.Tensor) -> torch.Tensor:
    return elementwise.launch(_quick_gelu_kernel, x)


def _reference(x: torch.Tensor) -> torch.Tensor:
    return reference(x).contiguous()


quick_gelu = define(
    "quick_gelu(Tensor x) -> Tensor",
    fake=elementwise.like,
    providers=(
        Provider("triton", _triton, supports=unsupported_rows),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="quick_gelu",
    level=1,
    by_default=True,
    reference=reference,
    op=quick_gelu,
    cases=(  # CLIP ViT-L/14: 257 patches per image, 77 tokens per text; Qwen2-VL's vision tower, 5120 wide
        Case("image_1", {"tokens": 1, "inner": 257, "d": 4096}, weight=24, tags=("model",)),
        Case("images_32", {"tokens": 32, "inner": 257, "d": 4096}, weight=24, tags=("model",)),
        Case("texts_32", {"tokens": 32, "inner": 77, "d": 3072}, weight=12, tags=("model",)),
        Case("patches_4k", {"tokens": 4096, "d": 5120}, weight=32, tags=("model",)),
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
    flops="4 * tokens * inner * d",
    batch_invariant=True,  # elementwise
)
