"""Gradients of causal attention over one chunk of a sequence, whose earlier keys and values are constants.

With P = softmax(scale q k^T) and D = rowsum(dO o O):  dV = P^T dO, dS = P o (dO V^T - D), dQ = scale dS K,
dK = scale dS^T Q, as in FlashAttention-2 (Dao, arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

T = torch.Tensor
SCORES = 1 << 27  # that the reference holds at once


def reference(q: T, k: T, v: T, grad: T, scale: float, window_left: int = -1) -> tuple[T, T, T]:
    """q, grad: [C, H, D]; k, v: [N, Hk, D], of which the last C belong to the chunk; H is a multiple of Hk.

    Query i sees keys up to its own, N - C + i, and at most window_left before it; -1: all. Computed in at least
    float32. Returns the gradients of q, and of the chunk's k and v [C, Hk, D].
    """
    check(q, k, v, grad)
    acc = torch.promote_types(q.dtype, torch.float32)
    (chunk, heads, _), (total, kv_heads, _) = q.shape, k.shape
    at = torch.arange(total - chunk, total, device=q.device)[:, None]
    keys = torch.arange(total, device=q.device)
    hidden = keys > at
    if window_left >= 0:
        hidden |= keys < at - window_left
    dq, dk, dv = (torch.zeros(t.shape, dtype=acc, device=q.device) for t in (q, k, v))
    share, step = heads // kv_heads, max(1, SCORES // max(chunk * total, 1))
    for first in range(0, heads, step):
        own = torch.arange(first, min(first + step, heads), device=q.device)
        queries, dout = (t[:, own].transpose(0, 1).to(acc) for t in (q, grad))  # [h, C, D]
        read, values = (t[:, own // share].transpose(0, 1).to(acc) for t in (k, v))
        p = (queries @ read.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        dp = dout @ values.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[:, own] = (ds @ read).transpose(0, 1)
        dk.index_add_(1, own // share, (ds.transpose(1, 2) @ queries).transpose(0, 1))
        dv.index_add_(1, own // share, (p.transpose(1, 2) @ dout).transpose(0, 1))
    return tuple(t[-chunk:].to(q.dtype) if chunk else t[:0].to(q.dtype) for t in (dq, dk, dv))  # type: ignore[return-value]


def check(q: T, k: T, v: T, grad: T) -> None:
    """Raise ValueError for shapes that contradict each other."""
    ok = q.dim() == 3 and k.dim() == 3 and grad.shape == q.shape and v.shape == k.shape
    if not ok or k.shape[2] != q.shape[2] or k.shape[0] < q.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention_grad: q {tuple(q.shape)} and grad {tuple(grad.shape)} must be [C, H, D], k {tuple(k.shape)} and"
            f" v {tuple(v.shape)} [N, Hk, D] with N >= C, and H a multiple of Hk"
        )


@triton.jit
def _scores(q, k, at, keys, total, scale, WINDOW: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (keys[None, :] <= at[:, None]) & (keys[None, :] < total)
    if WINDOW >= 0:
        seen &= keys[None, :] >= at[:, None] - WINDOW
    return tl.where(seen, s, float("-inf"))


@triton.jit(do_not_specialize=["chunk", "total"])
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, lse_ptr, delta_ptr, chunk, total, heads, kv_heads, scale,
    WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    cols = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < chunk) & (cols[None, :] < D)
    place = (rows[:, None].to(tl.int64) * heads + head) * D + cols[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    do = tl.load(grad_ptr + place, mask=inside, other=0.0)
    at = total - chunk + rows
    last = tl.minimum(total - chunk + (tl.program_id(0) + 1) * M, total)
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(total - chunk + tl.program_id(0) * M - WINDOW, 0) // N * N
    top = tl.full((M,), float("-inf"), tl.float32)
    norm = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, BLOCK_D), tl.float32)
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        there = (keys[:, None] < total) & (cols[None, :] < D)
        where = (keys[:, None].to(tl.int64) * kv_heads + kv_head) * D + cols[None, :]
        k = tl.load(k_ptr + where, mask=there, other=0.0)
        v = tl.load(v_ptr + where, mask=there, other=0.0)
        s = _scores(q, k, at, keys, total, scale, WINDOW, PRECISION)
        new = tl.maximum(top, tl.max(s, axis=1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(top - shift)
        norm = norm * alpha + tl.sum(p, axis=1)
        out = out * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new
    norm = tl.where(norm > 0.0, norm, 1.0)
    lse = tl.where(top == float("-inf"), 0.0, top) + tl.log(norm)
    delta = tl.sum(out / norm[:, None] * do.to(tl.float32), axis=1)
    tl.store(lse_ptr + head * chunk + rows, lse, mask=rows < chunk)
    tl.store(delta_ptr + head * chunk + rows, delta, mask=rows < chunk)
    dq = tl.zeros((M, BLOCK_D), tl.float32)
    for start in range(first, last, N):
        keys = start + tl.arange(0, N)
        there = (keys[:, None] < total) & (cols[None, :] < D)
        where = (keys[:, None].to(tl.int64) * kv_heads + kv_head) * D + cols[None, :]
        k = tl.load(k_ptr + where, mask=there, other=0.0)
        v = tl.load(v_ptr + where, mask=there, other=0.0)
        p = tl.exp(_scores(q, k, at, keys, total, scale, WINDOW, PRECISION) - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    tl.store(dq_ptr + place, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["chunk", "total"])
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, chunk, total, heads, kv_heads, scale,
    WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    own = tl.program_id(0) * N + tl.arange(0, N)  # of the chunk
    kv_head = tl.program_id(1)
    cols = tl.arange(0, BLOCK_D)
    keys = total - chunk + own
    there = (own[:, None] < chunk) & (cols[None, :] < D)
    where = (keys[:, None].to(tl.int64) * kv_heads + kv_head) * D + cols[None, :]
    k = tl.load(k_ptr + where, mask=there, other=0.0)
    v = tl.load(v_ptr + where, mask=there, other=0.0)
    dk = tl.zeros((N, BLOCK_D), tl.float32)
    dv = tl.zeros((N, BLOCK_D), tl.float32)
    first = tl.program_id(0) * N // M * M
    last = chunk
    if WINDOW >= 0:
        last = tl.minimum(chunk, (tl.program_id(0) + 1) * N + WINDOW)
    share = heads // kv_heads
    for head in range(kv_head * share, (kv_head + 1) * share):
        for start in range(first, last, M):
            rows = start + tl.arange(0, M)
            inside = (rows[:, None] < chunk) & (cols[None, :] < D)
            place = (rows[:, None].to(tl.int64) * heads + head) * D + cols[None, :]
            q = tl.load(q_ptr + place, mask=inside, other=0.0)
            do = tl.load(grad_ptr + place, mask=inside, other=0.0)
            lse = tl.load(lse_ptr + head * chunk + rows, mask=rows < chunk, other=0.0)
            delta = tl.load(delta_ptr + head * chunk + rows, mask=rows < chunk, other=0.0)
            s = _scores(q, k, total - chunk + rows, keys, total, scale, WINDOW, PRECISION)
            p = tl.where((rows < chunk)[:, None], tl.exp(s - lse[:, None]), 0.0)
            dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            ds = p * (dp - delta[:, None]) * scale
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision=PRECISION)
    to = (own[:, None].to(tl.int64) * kv_heads + kv_head) * D + cols[None, :]
    tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=there)


def _supports_triton(q: T, k: T, v: T, grad: T, scale: float, window_left: int = -1) -> str | None:
    kinds = {t.dtype for t in (q, k, v, grad)}
    if len(kinds) > 1 or q.dtype not in FLOATS:
        return f"q, k, v and grad have the dtypes {sorted(map(str, kinds))}, not one of float16, bfloat16 and float32"
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return "Triton's interpreter computes tl.dot of bfloat16 on its bits as integers"
    return f"{q.shape[2]} channels of a head are over 256" if q.shape[2] > 256 else None


def _triton(q: T, k: T, v: T, grad: T, scale: float, window_left: int = -1) -> tuple[T, T, T]:
    check(q, k, v, grad)
    q, k, v, grad = (t.contiguous() for t in (q, k, v, grad))
    dq, dk, dv = _fake(q, k, v, grad, scale)
    (chunk, heads, size), (total, kv_heads, _) = q.shape, k.shape
    if dq.numel() == 0:
        return dq, dk, dv
    lse, delta = torch.empty((2, heads, chunk), dtype=torch.float32, device=q.device)
    block_d = max(16, next_power_of_2(size))
    # Registers hold q, dO, an accumulator of the same size, and tiles of scores
    m, n = (64, 64) if block_d <= 128 and q.dtype != torch.float32 else (32, 32)
    sizes = (chunk, total, heads, kv_heads, scale)
    constants = {
        "WINDOW": window_left, "D": size, "BLOCK_D": block_d, "M": m, "N": n, "PRECISION": "ieee",
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    launch_kernel(
        _queries_kernel, (cdiv(chunk, m), heads), q, k, v, grad, dq, lse, delta, *sizes, **constants
    )
    launch_kernel(
        _keys_kernel, (cdiv(chunk, n), kv_heads), q, k, v, grad, dk, dv, lse, delta, *sizes, **constants
    )
    return dq, dk, dv


def _fake(q: T, k: T, v: T, grad: T, scale: float, window_left: int = -1) -> tuple[T, T, T]:
    own = (q.shape[0], *k.shape[1:])
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(own, dtype=q.dtype, device=q.device),
        torch.empty(own, dtype=q.dtype, device=q.device),
    )


attention_grad = define(
    "attention_grad(Tensor q, Tensor k, Tensor v, Tensor grad, float scale, int window_left=-1)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider(
            "reference",
            lambda *args: tuple(t.contiguous() for t in reference(*args)),
            devices=("cuda", "cpu"),
        ),
    ),
)


def _case(
    name: str, chunk: int, before: int, heads: int, kv_heads: int, size: int, tag: str = "odd",
    dtype: str = "float32", window: int = -1,
) -> Case:  # fmt: skip
    dims = {
        "queries": chunk,
        "before": before,
        "kv_heads": kv_heads,
        "share": heads // kv_heads,
        "size": size,
    }
    return Case(name, {**dims, "window_left": window, "scale": size**-0.5}, dtype, tags=(tag,))


SPEC = OpSpec(
    name="attention_grad",
    level=1,
    reference=reference,
    op=attention_grad,
    arguments=(
        Tensor("q", "queries kv_heads*share size"),
        Tensor("k", "before+queries kv_heads size"),
        Tensor("v", "before+queries kv_heads size"),
        Tensor("grad", "queries kv_heads*share size"),
        Scalar("scale"),
        Scalar("window_left", default=-1),
    ),
    outputs=(
        Tensor("dq", "queries kv_heads*share size"),
        Tensor("dk", "queries kv_heads size"),
        Tensor("dv", "queries kv_heads size"),
    ),
    axes={
        "queries": Axis.per_call(),
        "before": Axis.per_call(),
        "kv_heads": Axis.count(),
        "share": Axis.count(),
        "size": Axis.width(),
    },
    flops="10 * queries * (before + queries) * kv_heads * share * size",
    cases=(
        # A chunk of TTT-E2E 3B behind a full window, and its first one
        _case("ttt_8k", 1024, 8191, 32, 32, 80, "model", "bfloat16", 8191),
        _case("ttt_first", 1024, 0, 32, 32, 80, "model", "bfloat16", 8191),
        _case("one", 1, 0, 1, 1, 1),
        _case("odd_17", 17, 5, 2, 2, 20),
        _case("shared", 33, 0, 4, 2, 16, dtype="float16"),
        _case("window", 20, 15, 2, 1, 24, window=7),
        _case("narrow", 9, 3, 3, 3, 8, window=0),
        _case("half", 40, 30, 2, 2, 32, dtype="bfloat16", window=25),
        _case("long", 5, 70, 1, 1, 65, window=64),
        _case("blocks", 70, 40, 2, 1, 16, window=50),
    ),
    activations=("v", "grad"),
)
