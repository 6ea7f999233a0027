"""Products of two batches of matrices, both computed by the model: absorbed latent attention, contrastive scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a: [B, M, K]; b: [B, K, N]. Returns [B, M, N] in a's dtype, accumulated in at least float32."""
    _check(a, b)
    acc = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(acc), b.to(acc)).to(a.dtype)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if (
        a.dim() != 3
        or b.dim() != 3
        or a.shape[0] != b.shape[0]
        or a.shape[2] != b.shape[1]
        or a.dtype != b.dtype
    ):
        raise ValueError(
            f"batched_matmul: a must be [B, M, K] and b [B, K, N] of one dtype, got {tuple(a.shape)} {a.dtype} and"
            f" {tuple(b.shape)} {b.dtype}"
        )


@triton.jit
def _batched_matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, a_stride_b, a_stride_m, a_stride_k, b_stride_b, b_stride_k, b_stride_n,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_at = a_ptr + batch * a_stride_b + rows[:, None] * a_stride_m
    b_at = b_ptr + batch * b_stride_b + cols[None, :] * b_stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_at + ks[None, :] * a_stride_k, mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0)
        b = tl.load(b_at + ks[:, None] * b_stride_k, mask=(cols < N)[None, :] & (ks < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out_at = out_ptr + (batch * M + rows)[:, None] * N + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


def _triton(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    (batch, m, k), n = a.shape, b.shape[2]
    out = torch.empty((batch, m, n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    block_m, block_n, block_k = (
        min(most, max(16, next_power_of_2(size))) for most, size in ((64, m), (64, n), (64, k))
    )
    launch_kernel(
        _batched_matmul_kernel, (cdiv(m, block_m), cdiv(n, block_n), batch),
        a, b, out, m, n, k, *a.stride(), *b.stride(), PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


def _supports_triton(a: torch.Tensor, b: torch.Tensor) -> str | None:
    return None if a.dtype in FLOATS else f"a has dtype {a.dtype}, not float16, bfloat16 or float32"


def _torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _check(a, b)
    return torch.bmm(a, b)


batched_matmul = define(
    "batched_matmul(Tensor a, Tensor b) -> Tensor",
    fake=lambda a, b: a.new_empty((*a.shape[:2], b.shape[2])),
    providers=(  # cuBLAS first: the kernel is not measured against it yet
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", lambda *args: reference(*args).contiguous(), devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1, **dims: int) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="batched_matmul",
    level=1,
    reference=reference,
    op=batched_matmul,
    cases=(  # DeepSeek-V3: queries of 128 heads into the latent space, 32 tokens; outputs back
        _case("mla_queries", "model", weight=61, batch=128, rows=32, inner=128, columns=512),
        _case("mla_values", "model", weight=61, batch=128, rows=32, inner=512, columns=128),
        _case("contrast", "model", batch=1, rows=8, inner=512, columns=8),
        _case("mla_small", "model", batch=16, rows=1, inner=128, columns=64),
        _case("one", "odd", "float32", batch=1, rows=1, inner=1, columns=1),
        _case("odd_65", "odd", "float16", batch=2, rows=65, inner=7, columns=3),
        _case("odd_129", "odd", "float32", batch=1, rows=3, inner=129, columns=65),
        _case("odd_63", "odd", "float32", batch=3, rows=63, inner=65, columns=17),
        _case("odd_half", "odd", batch=2, rows=1, inner=100, columns=33),
    ),
    arguments=(Tensor("a", "batch rows inner"), Tensor("b", "batch inner columns")),
    outputs=(Tensor("out", "batch rows columns"),),
    axes={
        "batch": Axis.count(),
        "rows": Axis.per_call(),
        "inner": Axis.width(),
        "columns": Axis.width(),
    },
    flops="2 * batch * rows * inner * columns",
)
