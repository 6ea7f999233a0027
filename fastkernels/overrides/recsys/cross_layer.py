"""Cross layer of DCN v2 (Wang et al., arXiv 2008.13535) after its experts: y = x0 * (sum of h_k W_k^T + b) + x.

A full-rank layer is one expert with h = x. In a mixture of low-rank experts, h_k is multiplied by the gate of expert k:
the gates of a sample sum to 1, so the bias is added once.
"""

from __future__ import annotations

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

T = torch.Tensor
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MOST_RANK = 1024  # of one expert: a full-rank product is faster by cuBLAS (0.84 to 0.98 of it on an H200)
MOST_EXACT = 64  # samples whose float32 products are ours: more are faster by cuBLAS without tensor cores


def reference(x0: T, x: T, h: T, w: T, bias: T) -> T:
    """x0, x: [B, N]; h: [B, K, R]; w: [K, N, R]; bias: [N]. Returns x0 * (sum over K of h w^T + bias) + x, [B, N].

    Computed in float32 or float64; in x's dtype. Raises ValueError for shapes that do not fit.
    """
    _check(x0, x, h, w, bias)
    acc = torch.promote_types(x.dtype, torch.float32)
    inner = torch.einsum("bkr,knr->bn", h.to(acc), w.to(acc)) + bias.to(acc)
    return (x0.to(acc) * inner + x.to(acc)).to(x.dtype)


def _check(x0: T, x: T, h: T, w: T, bias: T) -> None:
    if x.dim() != 2 or x0.shape != x.shape:
        raise ValueError(f"cross_layer: x0 and x must be [B, N], got {tuple(x0.shape)} and {tuple(x.shape)}")
    batch, n = x.shape
    if h.dim() != 3 or len(h) != batch or w.shape != (h.shape[1], n, h.shape[2]) or bias.shape != (n,):
        raise ValueError(
            f"cross_layer: for x {tuple(x.shape)}, h must be [{batch}, K, R], w [K, {n}, R] and bias [{n}], got"
            f" {tuple(h.shape)}, {tuple(w.shape)} and {tuple(bias.shape)}"
        )


@triton.jit(do_not_specialize=["B"])
def _cross_kernel(
    h_ptr, w_ptr, bias_ptr, x0_ptr, x_ptr, out_ptr, h_stride, h_expert, w_stride, w_expert, x0_stride, x_stride, B, N,
    R, SIZE, EXPERTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # SIZE = R times the number of experts: the products of all experts are one, along their ranks behind each other.
    follow(OVERLAP)
    samples = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    here, there = samples < B, cols < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, SIZE, BLOCK_K):
        ranks = first + tl.arange(0, BLOCK_K)
        inside = (ranks < SIZE)[None, :]
        h_at, w_at = ranks, ranks
        if EXPERTS:
            h_at = ranks // R * h_expert + ranks % R
            w_at = (ranks // R).to(tl.int64) * w_expert + ranks % R
        h_at = h_ptr + samples[:, None] * h_stride + h_at[None, :]
        h = tl.load(h_at, mask=here[:, None] & inside, other=0.0)
        w_at = w_ptr + cols[:, None] * w_stride + w_at[None, :]
        w = tl.load(w_at, mask=there[:, None] & inside, other=0.0)
        acc = tl.dot(h, tl.trans(w), acc, input_precision=PRECISION)
    bias = tl.load(bias_ptr + cols, mask=there, other=0.0).to(tl.float32)
    mask = here[:, None] & there[None, :]
    x0 = tl.load(x0_ptr + samples[:, None] * x0_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + samples[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = x0 * (acc + bias[None, :]) + x
    tl.store(out_ptr + samples[:, None] * N + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def _exact(x: T) -> bool:
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def unsupported_product(x0: T, x: T, w: T, *others: T) -> str | None:
    """Return why `add_product` does not run with these tensors, or None."""
    if x.dtype not in FLOATS or len({t.dtype for t in (x0, x, w, *others)}) > 1:
        return f"dtypes {x0.dtype}, {x.dtype}, {w.dtype} are not one of float16, bfloat16 and float32"
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    for name, t in (("x0", x0), ("x", x), ("w", w)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    if _exact(x) and len(x) > MOST_EXACT:
        return ForOthers(f"cuBLAS multiplies {len(x)} samples in float32 faster")
    return None


def add_product(x0: T, x: T, h: T, w: T, bias: T) -> T:
    """Triton's kernel, for shapes as `reference` takes them. The last dimensions of all must be contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    (batch, n), (_, experts, rank) = x.shape, h.shape
    block_m = 16 if batch <= 16 else 32 if batch <= 32 else 64 if batch <= 512 else 128
    block_n = 32 if batch <= 64 else 64 if batch <= 512 else 128
    launch_kernel(
        _cross_kernel, (cdiv(n, block_n), cdiv(batch, block_m)), h, w, bias.contiguous(), x0, x, out, h.stride(0),
        h.stride(1), w.stride(1), w.stride(0), x0.stride(0), x.stride(0), batch, n, rank, experts * rank,
        EXPERTS=experts > 1, PRECISION="ieee" if _exact(x) else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64 if x.dtype != torch.float32 else 32,
        num_warps=8 if block_m == 128 else 4, num_stages=4 if x.dtype != torch.float32 else 3,
    )  # fmt: skip
    return out


def _supports_triton(x0: T, x: T, h: T, w: T, bias: T) -> str | None:
    if h.stride(-1) != 1:
        return f"h has strides {tuple(h.stride())}: the last dimension must be contiguous"
    if h.shape[1] == 1 and h.shape[2] > MOST_RANK:
        return ForOthers(f"one product of rank {h.shape[2]}, over {MOST_RANK}")
    return unsupported_product(x0, x, w, h, bias)


def _triton(x0: T, x: T, h: T, w: T, bias: T) -> T:
    _check(x0, x, h, w, bias)
    return add_product(x0, x, h, w, bias)


def _torch(x0: T, x: T, h: T, w: T, bias: T) -> T:
    _check(x0, x, h, w, bias)
    rows = w[0] if len(w) == 1 else w.transpose(0, 1).flatten(1)
    return torch.addcmul(x, x0, F.linear(h.flatten(1), rows, bias))


cross_layer = define(
    "cross_layer(Tensor x0, Tensor x, Tensor h, Tensor w, Tensor bias) -> Tensor",
    fake=lambda x0, x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("torch", _torch, devices=("cuda", "cpu")),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(
    name: str,
    tag: str,
    samples: int,
    n: int,
    rank: int,
    experts: int = 1,
    dtype: str = "bfloat16",
    weight: float = 1,
) -> Case:
    dims = {"samples": samples, "experts": experts, "n": n, "rank": rank}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="cross_layer",
    level=2,
    reference=reference,
    op=cross_layer,
    arguments=(
        Tensor("x0", "samples n"),
        Tensor("x", "samples n"),
        Tensor("h", "samples experts rank"),
        Tensor("w", "experts n rank", values=fan_in),
        Tensor("bias", "n", std=0.1),
    ),
    outputs=(Tensor("out", "samples n"),),
    axes={"samples": Axis.per_call(), "experts": Axis.count(), "n": Axis.width(), "rank": Axis.width()},
    flops="2 * samples * experts * n * rank",
    cases=(  # DLRMv2's 27 vectors of 128: full rank, and its rank of 512 as 4 experts of 128
        *(_case(f"full_{b}", "model", b, 3456, 3456, weight=w) for b, w in ((1, 4), (32, 4), (2048, 1))),
        *(_case(f"experts_{b}", "model", b, 3456, 128, 4, weight=w) for b, w in ((1, 4), (32, 4), (2048, 1))),
        _case("one", "odd", 1, 1, 1, dtype="float32"),
        _case("odd_63", "odd", 63, 72, 9, 3, "float32"),
        _case("odd_half", "odd", 7, 130, 33, 2, "float16"),
        _case("rank_one", "odd", 5, 40, 1, 4, "float32"),
        _case("full", "odd", 20, 48, 48, dtype="float16"),
        _case("odd_bf16", "odd", 33, 96, 17, 2),
        _case("wide", "odd", 3, 300, 65, 2, "float16"),
        _case("none", "odd", 0, 32, 8, 2, "float32"),
    ),
    tolerance={
        "float32": Tolerance(2e-5, 2e-5), "float16": Tolerance(4e-3, 4e-3), "bfloat16": Tolerance(3e-2, 3e-2),
    },
    activations=("x0", "x", "h"),
    baseline="torch",
)  # fmt: skip
