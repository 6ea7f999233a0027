"""GEGLU in diffusers' order, y = x[..., :d] * gelu(x[..., d:]) (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.elementwise import normal_cdf
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import rows, unsupported_rows


def reference(x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * d], values then gate. Returns [..., d] in x's dtype, to which GELU (erf) of the gate is rounded."""
    values, gate = x.chunk(2, dim=-1)
    return values * F.gelu(gate)


@triton.jit
def _geglu_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pid = tl.program_id(0)
    row, block = (pid // n_blocks).to(tl.int64), pid % n_blocks
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    values = tl.load(x_at, mask=cols < D, other=0.0)
    gate = tl.load(x_at + D, mask=cols < D, other=0.0).to(tl.float32)
    if x_ptr.dtype.element_ty == tl.float32:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        cdf = normal_cdf(gate)
    gelu = (gate * cdf).to(values.dtype)
    out = values.to(tl.float32) * gelu.to(tl.float32)
    tl.store(out_ptr + row * D + cols, out.to(values.dtype), mask=cols < D)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _check(x: torch.Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"geglu: x must be [..., 2 * d], got shape {tuple(x.shape)}")


def _triton(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    out = _fake(x)
    if out.numel() == 0:
        return out
    found, d = rows(x), out.shape[-1]
    assert found is not None, x.stride()
    block = min(next_power_of_2(d), 1024)
    n_blocks = cdiv(d, block)
    launch_kernel(
        _geglu_kernel, (out.numel() // d * n_blocks,), x, out, *found, d, n_blocks, BLOCK=block, num_warps=4
    )
    return out


def _reference(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    return reference(x).contiguous()


geglu = define(
    "geglu(Tensor x) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=unsupported_rows),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)

SPEC = OpSpec(
    name="geglu",
    level=1,
    reference=reference,
    op=geglu,
    arguments=(elementwise.PAIR,),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="10 * tokens * inner * d",
    cases=(  # SDXL at 1024 px, an image and its unconditional twin
        Case("sdxl_32", {"tokens": 2, "inner": 1024, "d": 5120}, weight=60, tags=("model",)),
        Case("sdxl_64", {"tokens": 2, "inner": 4096, "d": 2560}, weight=10, tags=("model",)),
        Case("one", {"tokens": 1, "d": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "d": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "d": 1128}, "float16", tags=("odd",)),
        Case("odd_17", {"tokens": 17, "d": 321}, tags=("odd",)),
        Case("half", {"tokens": 5, "inner": 3, "d": 129}, "float16", tags=("odd",)),
        Case("wide", {"tokens": 2, "d": 5001}, "float32", tags=("odd",)),
        Case("batched", {"tokens": 2, "inner": 7, "d": 63}, "float32", tags=("odd",)),
    ),
)
