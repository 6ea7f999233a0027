"""SwiGLU activation, y = silu(x[..., :d]) * x[..., d:] (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.activation import silu_and_mul_cpp
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * d], gate then up. Returns [..., d] in x's dtype.

    The gate's activation is rounded to x's dtype before the product, as both hosts' own forward_native does;
    each of the two steps is computed in at least float32.
    """
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, x_stride0, x_stride1, n_inner, D, n_blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row and block of columns: a decode step has few rows and many columns.
    pid = tl.program_id(0)
    row = (pid // n_blocks).to(tl.int64)
    cols = (pid % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    x_at = x_ptr + (row // n_inner) * x_stride0 + (row % n_inner) * x_stride1 + cols
    gate = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_at + D, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * D + cols, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: x must be [..., 2 * d], got shape {tuple(x.shape)}")


def _supports_triton(x: torch.Tensor) -> str | None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {x.dtype} is not float16, bfloat16 or float32"
    if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
        return f"x has strides {tuple(x.stride())}: the last dimension must be contiguous"
    return None


def _triton(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    d = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], d), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.dim() == 3:
        inner, stride0, stride1 = x.shape[1], x.stride(0), x.stride(1)
    else:
        inner, stride0, stride1 = 1, x.stride(0) if x.dim() == 2 else 2 * d, 0
    block = min(next_power_of_2(d), 1024)
    n_blocks = cdiv(d, block)
    grid = (out.numel() // d * n_blocks,)
    launch_kernel(
        _silu_and_mul_kernel, grid, x, out, stride0, stride1, inner, d, n_blocks, BLOCK=block, num_warps=4
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    return reference(x)


def _cpp(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    out = silu_and_mul_cpp.activate(x)
    return reference(x) if out is None else out


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


silu_and_mul = define(
    "silu_and_mul(Tensor x) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("cpp", _cpp, devices=("cpu",), missing=silu_and_mul_cpp.missing),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="silu_and_mul",
    level=1,
    by_default=True,
    reference=reference,
    op=silu_and_mul,
    cases=(
        Case("decode_1", {"tokens": 1, "d": 14336}, weight=32, tags=("model",)),
        Case("decode_32", {"tokens": 32, "d": 14336}, weight=32, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "d": 14336}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "d": 1}, dtype="float32", tags=("odd",)),
        Case("odd_1000", {"tokens": 63, "d": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "d": 1128}, dtype="float16", tags=("odd",)),
        Case("batched", {"tokens": 2, "inner": 7, "d": 63}, dtype="float32", tags=("odd",)),
        Case("narrow", {"tokens": 130, "d": 7}, dtype="float16", tags=("odd",)),
        Case("smollm2", {"tokens": 5, "d": 1536}, tags=("odd",)),
    ),
    arguments=(elementwise.PAIR,),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="5 * tokens * inner * d",
    batch_invariant=True,  # elementwise
)
