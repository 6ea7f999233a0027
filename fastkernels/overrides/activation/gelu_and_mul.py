"""GeGLU activation, y = gelu(x[..., :d]) * x[..., d:] (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Scalar
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.elementwise import normal_cdf
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows

SMALL = 1 << 20  # elements


def reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: [..., 2 * d], gate then up; approximate: 'none' (erf) or 'tanh'. Returns [..., d] in x's dtype.

    The gate's activation is rounded to x's dtype before the product, as both hosts' own forward_native does;
    each of the two steps is computed in at least float32.
    """
    d = x.shape[-1] // 2
    return F.gelu(x[..., :d], approximate=approximate) * x[..., d:]


@triton.jit
def _gelu_and_mul_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_blocks,
    TANH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row and block of columns, as in silu_and_mul.
    pid = tl.program_id(0)
    row, block = (pid // n_blocks).to(tl.int64), pid % n_blocks
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    gate = tl.load(x_at, mask=cols < D, other=0.0).to(tl.float32)
    up = tl.load(x_at + D, mask=cols < D, other=0.0)
    if TANH:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) with u = sqrt(2 / pi) (g + 0.044715 g^3)
        cdf = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif x_ptr.dtype.element_ty == tl.float32:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        cdf = normal_cdf(gate)
    gelu = (gate * cdf).to(up.dtype)
    out = gelu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * D + cols, out.to(up.dtype), mask=cols < D)


def _check(x: torch.Tensor, approximate: str) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"gelu_and_mul: x must be [..., 2 * d], got shape {tuple(x.shape)}")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_and_mul: approximate must be 'none' or 'tanh', got {approximate!r}")


def _triton(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    _check(x, approximate)
    out = _fake(x, approximate)
    found, d = rows(x), out.shape[-1]
    if out.numel() == 0:
        return out
    assert found is not None, x.stride()
    # A small tensor has few programs: smaller blocks raise the occupancy.
    small = approximate == "none" and out.numel() <= SMALL
    block = min(next_power_of_2(d), 512 if small else 1024)
    n_blocks = cdiv(d, block)
    grid = (out.numel() // d * n_blocks,)
    launch_kernel(
        _gelu_and_mul_kernel, grid,
        x, out, *found, d, n_blocks, TANH=approximate == "tanh", BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    _check(x, approximate)
    return reference(x, approximate).contiguous()


def _fake(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


gelu_and_mul = define(
    'gelu_and_mul(Tensor x, str approximate="none") -> Tensor',
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=lambda x, approximate="none": unsupported_rows(x)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def unsupported_approximate(module: Any) -> str | None:
    """Why our forward does not serve this module, by its `approximate`; None if it does."""
    found = getattr(module, "approximate", None)
    return None if found in ("none", "tanh") else f"approximate={found!r} is not 'none' or 'tanh'"


def _case(name: str, dims: dict[str, int], approximate: str, dtype: str, weight: float, tag: str) -> Case:
    return Case(name, {**dims, "approximate": approximate}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="gelu_and_mul",
    level=1,
    by_default=True,
    reference=reference,
    op=gelu_and_mul,
    cases=(  # Gemma 2 9B, and GeGLU with erf at the same size
        _case("decode_1", {"tokens": 1, "d": 14336}, "tanh", "bfloat16", 42, "model"),
        _case("decode_32", {"tokens": 32, "d": 14336}, "tanh", "bfloat16", 42, "model"),
        _case("prefill_8k", {"tokens": 8192, "d": 14336}, "tanh", "bfloat16", 1, "model"),
        _case("erf_32", {"tokens": 32, "d": 14336}, "none", "bfloat16", 1, "model"),
        _case("one", {"tokens": 1, "d": 1}, "none", "float32", 1, "odd"),
        _case("tanh_1000", {"tokens": 63, "d": 1000}, "tanh", "bfloat16", 1, "odd"),
        _case("erf_1128", {"tokens": 3, "d": 1128}, "none", "float16", 1, "odd"),
        _case("erf_narrow", {"tokens": 130, "d": 7}, "none", "bfloat16", 1, "odd"),
        _case("tanh_batched", {"tokens": 2, "inner": 7, "d": 63}, "tanh", "float32", 1, "odd"),
        _case("erf_batched", {"tokens": 2, "inner": 7, "d": 63}, "none", "float32", 1, "odd"),
    ),
    arguments=(elementwise.PAIR, Scalar("approximate")),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="10 * tokens * inner * d",
    batch_invariant=True,  # elementwise
)
