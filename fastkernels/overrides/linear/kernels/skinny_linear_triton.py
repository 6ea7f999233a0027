"""y = x W^T + b for 1 to 64 tokens. Reading the weight takes all the time: all SMs read it together, each byte once.

A program owns BLOCK_N rows of the weight and one of SPLIT_K parts of K. With splits, the last program of a tile to
arrive adds the float32 sums of all, always in the same order: equal calls have equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, multiprocessors, tickets

MAX_TOKENS = 64


def _set(variant: str, block_m: int, block_n: int, block_k: int, split_k: int, num_warps: int, num_stages: int
         ) -> dict[str, Any]:  # fmt: skip
    return {
        "variant": variant, "block_m": block_m, "block_n": block_n, "block_k": block_k, "split_k": split_k,
        "num_warps": num_warps, "num_stages": num_stages,
    }  # fmt: skip


# Parameter sets; for each number of tokens (block_m) the preferred one first. Any set is correct for any shape.
#   sum   CUDA cores, up to 4 tokens: no padding; as many rows of the weight in flight as registers allow
#   swap  tensor cores, the weight is the left matrix (16 rows and up), so tokens are padded to 8 only
#   dot   tensor cores, x is the left matrix: tokens are padded to 16
PARAMS: tuple[dict[str, Any], ...] = (
    *(_set("sum", m, *sizes) for m in (1, 2) for sizes in ((8, 512, 1, 4, 4), (16, 256, 1, 4, 4))),
    *(_set("sum", 4, *sizes) for sizes in ((8, 256, 1, 4, 4), (16, 256, 1, 8, 4))),
    *(
        _set("swap", 8, *sizes)
        for sizes in (
            (32, 256, 1, 2, 4), (16, 512, 1, 1, 4), (64, 128, 1, 4, 5), (64, 256, 1, 4, 4), (16, 256, 1, 1, 4),
        )
    ),
    *(
        _set("swap", 16, *sizes)
        for sizes in (
            (64, 256, 1, 4, 4), (64, 128, 1, 4, 5), (32, 256, 1, 2, 4), (128, 64, 1, 4, 5), (64, 128, 2, 4, 5),
        )
    ),
    *(_set("dot", 16, *sizes) for sizes in ((64, 128, 1, 4, 5), (32, 256, 1, 4, 4))),
    *(_set("swap", 32, *sizes) for sizes in ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4))),
    *(_set("swap", 64, *sizes) for sizes in ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (128, 64, 1, 4, 5))),
)  # fmt: skip


def fits(params: dict[str, Any], m: int, k: int) -> bool:
    """Return whether these parameters suit m tokens and K = k: one tile of tokens, little padding, no empty split."""
    padded = next(b for b in (1, 2, 4, 8, 16, 32, 64) if b >= min(m, MAX_TOKENS))
    floor = {"sum": 1, "swap": 8, "dot": 16}[params["variant"]]
    return params["block_m"] == max(padded, floor) and params["split_k"] * params["block_k"] <= max(
        k, params["block_k"]
    )


def busy(params: dict[str, Any], n: int, sms: int) -> float:
    """Return the share of the SMs that have a program, on average over all waves. A wave is one program on each."""
    programs = -(-n // params["block_n"]) * params["split_k"]
    return programs / (sms * -(-programs // sms))


@lru_cache(maxsize=1024)
def choose(m: int, n: int, k: int, sms: int = 132) -> dict[str, Any]:
    """Return the default parameters for x [m, k] and weight [n, k]: the first set with an occupancy of 90%.

    This heuristic only avoids the worst case, a nearly empty last wave.
    """
    sets = [p for p in PARAMS if fits(p, m, k)]
    best = max(sets, key=lambda p: busy(p, n, sms))
    return next((p for p in sets if busy(p, n, sms) >= 0.9), best)


@triton.jit
def _weights(w_at, k, ks, K: tl.constexpr, BLOCK_K: tl.constexpr):
    # The weight is read once: first to be evicted. (Triton 3.6 drops the hint in pipelined loops: cp.async has none.)
    if K % BLOCK_K == 0:
        return tl.load(w_at + k + ks[None, :], eviction_policy="evict_first")
    else:
        return tl.load(
            w_at + k + ks[None, :], mask=ks[None, :] < K - k, other=0.0, eviction_policy="evict_first"
        )


@triton.jit
def _token(x_at, k, ks, there, K: tl.constexpr, BLOCK_K: tl.constexpr):
    # One token's part of x as float32, [1, BLOCK_K]; zeros past the last token.
    mask = there if K % BLOCK_K == 0 else there & (ks[None, :] < K - k)
    return tl.load(x_at + k + ks[None, :], mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, partial_ptr, ticket_ptr, M, N, x_stride, w_stride,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr, VARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * BLOCK_M
    rows = token + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # A row past the end is the last row again: the hot loop needs no mask.
    w_at = w_ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * w_stride
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = split * steps // SPLIT_K * BLOCK_K, (split + 1) * steps // SPLIT_K * BLOCK_K
    ks = tl.arange(0, BLOCK_K)
    if VARIANT == "sum":
        # Each product has an accumulator of its own; they are summed once, after the loop.
        acc0 = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        x_at = x_ptr + token * x_stride
        for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            w = _weights(w_at, k, ks, K, BLOCK_K).to(tl.float32)
            acc0 += w * _token(x_at, k, ks, token < M, K, BLOCK_K)
            if BLOCK_M > 1:
                acc1 += w * _token(x_at + x_stride, k, ks, token + 1 < M, K, BLOCK_K)
            if BLOCK_M > 2:
                acc2 += w * _token(x_at + 2 * x_stride, k, ks, token + 2 < M, K, BLOCK_K)
                acc3 += w * _token(x_at + 3 * x_stride, k, ks, token + 3 < M, K, BLOCK_K)
        row, col = rows[:, None], cols[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32) + tl.sum(acc0, axis=1)[None, :]
        if BLOCK_M > 1:
            acc = tl.where(row == token + 1, tl.sum(acc1, axis=1)[None, :], acc)
        if BLOCK_M > 2:
            acc = tl.where(row == token + 2, tl.sum(acc2, axis=1)[None, :], acc)
            acc = tl.where(row == token + 3, tl.sum(acc3, axis=1)[None, :], acc)
    else:
        if VARIANT == "swap":
            row, col, kx = rows[None, :], cols[:, None], ks[:, None]
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            row, col, kx = rows[:, None], cols[None, :], ks[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        x_at = x_ptr + row * x_stride + kx
        for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            w = _weights(w_at, k, ks, K, BLOCK_K)
            x_mask = row < M if K % BLOCK_K == 0 else (row < M) & (kx < K - k)
            x = tl.load(x_at + k, mask=x_mask, other=0.0, eviction_policy="evict_last")
            if UPCAST:
                w, x = w.to(tl.float32), x.to(tl.float32)
            if VARIANT == "swap":
                acc = tl.dot(w, x, acc)
            else:
                acc = tl.dot(x, w.T, acc)
    mask = (row < M) & (col < N)
    at = row.to(tl.int64) * N + col
    mine = True
    if SPLIT_K > 1:
        tl.store(partial_ptr + split.to(tl.int64) * M * N + at, acc, mask=mask)
        tl.debug_barrier()  # one thread takes the ticket, after all threads have stored
        ticket = ticket_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        mine = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
        if mine:
            acc = tl.zeros_like(acc)
            for i in tl.static_range(SPLIT_K):
                part = partial_ptr + tl.cast(i, tl.int64) * M * N + at
                acc += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(ticket, 0)  # for the next launch
    if mine:
        if HAS_BIAS:
            acc += tl.load(b_ptr + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def supports_skinny(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why the Triton kernel for few tokens does not support this call, None if it does."""
    if (reason := unaligned(x, weight, bias)) is not None:
        return reason
    if x.numel() // weight.shape[1] > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens"  # without the number: each reason is reported once
    return None


def unaligned(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Return why rows cannot be read in pieces of 16 bytes, None if they can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} is not bfloat16 or float16"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}, x is {x.dtype}"
    k = weight.shape[1]
    if k == 0 or k % 8:
        return f"K = {k} is not a multiple of 8: the weight is read in pieces of 16 bytes"
    if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.data_ptr() % 16:
        return (
            f"weight has strides {tuple(weight.stride())}: its rows must be contiguous and start at 16 bytes"
        )
    if x.stride(-1) != 1:
        return f"x has strides {tuple(x.stride())}: the last dimension must be contiguous"
    if bias is not None and not bias.is_contiguous():
        return f"bias has strides {tuple(bias.stride())}, not contiguous"
    return None


def linear_skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **params: Any
) -> torch.Tensor:
    """x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N] in x's dtype.

    params: one of PARAMS, or some of its keys; `choose` gives the others.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    p = {**choose(m, n, k, multiprocessors(x.device)), **params}
    grid = (cdiv(n, p["block_n"]), p["split_k"], cdiv(m, p["block_m"]))
    partial = taken = None
    if p["split_k"] > 1:
        partial = torch.empty((p["split_k"], m, n), dtype=torch.float32, device=x.device)
        taken = tickets.get(x.device, grid[0] * grid[2])
    _skinny_kernel[grid](
        rows, weight, bias, out, partial, taken, m, n, rows.stride(0), weight.stride(0), K=k,
        HAS_BIAS=bias is not None, UPCAST=x.device.type == "cpu", VARIANT=p["variant"], BLOCK_M=p["block_m"],
        BLOCK_N=p["block_n"], BLOCK_K=p["block_k"], SPLIT_K=p["split_k"], STAGES=p["num_stages"],
        num_warps=p["num_warps"], num_stages=p["num_stages"],
    )  # fmt: skip
    return out
