"""Low-rank cross layer of DCN v2 (Wang et al., arXiv 2008.13535): y = x0 * (W (V x) + b) + x."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Tensor, fan_in
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_EXACT = 64  # samples whose float32 products are ours: more are faster by cuBLAS without tensor cores


def reference(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """x0, x: [B, N]; v: [R, N]; w: [N, R]; bias: [N]. Returns x0 * (x v^T w^T + bias) + x, [B, N] in x's dtype.

    x0 is the input of the first layer, x that of this one. Computed in float32 or float64. Raises ValueError for shapes
    that do not fit.
    """
    _check(x0, x, v, w, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    inner = F.linear(F.linear(x.to(acc), v.to(acc)), w.to(acc), bias.to(acc))
    return (x0.to(acc) * inner + x.to(acc)).to(x.dtype)


def _check(x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    n = x.shape[-1] if x.dim() == 2 else -1
    if x0.shape != x.shape or n < 0:
        raise ValueError(
            f"cross_low_rank: x0 and x must be [B, N], got {tuple(x0.shape)} and {tuple(x.shape)}"
        )
    if v.dim() != 2 or v.shape[1] != n or w.shape != v.shape[::-1] or bias.shape != (n,):
        raise ValueError(
            f"cross_low_rank: for x {tuple(x.shape)}, v must be [R, {n}], w [{n}, R] and bias [{n}], got"
            f" {tuple(v.shape)}, {tuple(w.shape)} and {tuple(bias.shape)}"
        )


@triton.jit(do_not_specialize=["B"])
def _cross_kernel(
    h_ptr, w_ptr, bias_ptr, x0_ptr, x_ptr, out_ptr, h_stride, w_stride, x0_stride, x_stride, B, N, R,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The second product, h w^T, with all that follows: h is x v^T.
    follow(OVERLAP)
    samples = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    here, there = samples < B, cols < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, R, BLOCK_K):
        ranks = first + tl.arange(0, BLOCK_K)
        h_at = h_ptr + samples[:, None] * h_stride + ranks[None, :]
        h = tl.load(h_at, mask=here[:, None] & (ranks < R)[None, :], other=0.0)
        w_at = w_ptr + cols[:, None] * w_stride + ranks[None, :]
        w = tl.load(w_at, mask=there[:, None] & (ranks < R)[None, :], other=0.0)
        acc = tl.dot(h, tl.trans(w), acc, input_precision=PRECISION)
    bias = tl.load(bias_ptr + cols, mask=there, other=0.0).to(tl.float32)
    mask = here[:, None] & there[None, :]
    x0 = tl.load(x0_ptr + samples[:, None] * x0_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + samples[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = x0 * (acc + bias[None, :]) + x
    tl.store(out_ptr + samples[:, None] * N + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def _exact(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def _supports_triton(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> str | None:
    if x.dtype not in FLOATS or len({t.dtype for t in (x0, x, v, w, bias)}) > 1:
        return f"dtypes {x0.dtype}, {x.dtype}, {w.dtype} are not one of float16, bfloat16 and float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    for name, t in (("x0", x0), ("x", x), ("w", w)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if _exact(x) and len(x) > MOST_EXACT:
        return ForOthers(f"cuBLAS multiplies {len(x)} samples in float32 faster")
    return None


def _triton(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    _check(x0, x, v, w, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    h = F.linear(x, v)
    (batch, n), rank = x.shape, h.shape[1]
    block_m = 16 if batch <= 16 else 32 if batch <= 32 else 64 if batch <= 512 else 128
    block_n = 32 if batch <= 64 else 64 if batch <= 512 else 128
    launch_kernel(
        _cross_kernel, (cdiv(n, block_n), cdiv(batch, block_m)), h, w, bias.contiguous(), x0, x, out, h.stride(0),
        w.stride(0), x0.stride(0), x.stride(0), batch, n, rank, PRECISION="ieee" if _exact(x) else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64 if x.dtype != torch.float32 else 32,
        num_warps=8 if block_m == 128 else 4, num_stages=4 if x.dtype != torch.float32 else 3,
    )  # fmt: skip
    return out


def _torch(
    x0: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    _check(x0, x, v, w, bias)
    return torch.addcmul(x, x0, F.linear(F.linear(x, v), w, bias))


cross_low_rank = define(
    "cross_low_rank(Tensor x0, Tensor x, Tensor v, Tensor w, Tensor bias) -> Tensor",
    fake=lambda x0, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str, tag: str, samples: int, n: int, rank: int, dtype: str = "bfloat16", weight: float = 1
) -> Case:
    return Case(name, {"samples": samples, "n": n, "rank": rank}, dtype, weight, (tag,))


def _ones(args: list[Any]) -> None:
    args[0].fill_(1)


SPEC = OpSpec(
    name="cross_low_rank",
    level=2,
    reference=reference,
    op=cross_low_rank,
    arguments=(
        Tensor("x0", "samples n"),
        Tensor("x", "samples n"),
        Tensor("v", "rank n", values=fan_in),
        Tensor("w", "n rank", values=fan_in),
        Tensor("bias", "n", std=0.1),
    ),
    outputs=(Tensor("out", "samples n"),),
    axes={"samples": Axis.per_call(), "n": Axis.width(), "rank": Axis.width()},
    flops="4 * samples * n * rank",
    cases=(  # DLRMv2: 27 vectors of 128, rank 512
        *(_case(f"dlrm_{b}", "model", b, 3456, 512, weight=w) for b, w in ((1, 16), (32, 16), (2048, 4))),
        *(_case(f"dlrm_{b}_float", "model", b, 3456, 512, "float32", w) for b, w in ((1, 16), (32, 16), (2048, 4))),
        _case("one", "odd", 1, 1, 1, "float32"),
        _case("odd_63", "odd", 63, 72, 9, "float32"),
        _case("odd_half", "odd", 7, 130, 33, "float16"),
        _case("rank_one", "odd", 5, 40, 1, "float32"),
        _case("full_rank", "odd", 20, 48, 48, "float16"),
        _case("odd_bf16", "odd", 33, 96, 17),
        _case("wide", "odd", 3, 300, 65, "float16"),
        _case("none", "odd", 0, 32, 8, "float32"),
    ),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2),
    },
    activations=("x0", "x"),
    extremes={"ones": _ones},
    baseline="torch",
)  # fmt: skip
