"""Chunks of 64 tokens with products of matrices: a kernel for all chunks at once, and one that carries the states.

Within a chunk that begins with the state S, and with decays d_ij from token j to token i:

    o_i = scale (d_i0 q_i)^T S + scale sum_j<=i d_ij (q_i . k_j) x_j
    x = v, or for the rules that correct the state x = U + W S, where W and U are solutions of a triangular system:
        (I + L) x = beta (v - d_i0 k^T S), L_ij = beta_i d_ij (k_i . k_j) for j < i      gated delta rule
    S' = d_C0 S + sum_j d_Cj k_j x_j^T

With a decay for each channel, exp(G_i - G_j) is split at a token m: exp(G_i - G_m) exp(G_m - G_j), and the pairs of a
block are one product of matrices. That overflows if the decays of the block are strong. Its pairs are then halved:
tokens of the upper and the lower half meet at the border of the halves, so that both factors are at most 1, and each
half is a block of its own. A chunk is halved until its blocks decay by less than exp(-SPREAD), at most six times.

Chunk n of sequence i has the number cu_seqlens[i] // 64 + i + n, which needs no count of the chunks before it. Numbers
without a chunk are skipped: the grid follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence.kernels import linear_chunks, recurrent
from fastkernels.overrides.recurrence.kernels.chunk_parts import inverse, limited, sequence_of
from fastkernels.overrides.recurrence.kernels.chunk_products import products_kernel
from fastkernels.overrides.recurrence.kernels.problem import (
    BY_CHANNEL,
    DELTA,
    LINEAR,
    PAIR,
    Problem,
    sequence_at,
    softplus,
    strides,
)
from fastkernels.overrides.recurrence.kernels.results import result_like

CHUNK = 64
LEAST = 32  # tokens of a sequence, in the mean, from which chunks are used


@triton.jit(do_not_specialize=["B", "STEPS"])
def _sums_kernel(
    g_ptr, sums_ptr, left_ptr, cu_ptr, B, STEPS, H, K, g_t, g_h, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr
):
    # G [T, H, K]: sums of g from the beginning of the chunk.
    follow(OVERLAP)
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    i = sequence_of(cu_ptr, chunk, B, STEPS, 64)
    start = tl.load(cu_ptr + i)
    first = start + (chunk - start // 64 - i) * 64
    end = tl.load(cu_ptr + i + 1)
    if first >= end:
        return
    if left_ptr is not None:  # noqa: SIM102 - Triton evaluates both sides of `and`
        if tl.load(left_ptr + chunk * H + h) == 0:
            return
    row = first.to(tl.int64) + tl.arange(0, 64)
    for at in range(0, K, BLOCK_K):
        cols = at + tl.arange(0, BLOCK_K)
        inside = (row < end)[:, None] & (cols < K)[None, :]
        g = tl.load(g_ptr + row[:, None] * g_t + h * g_h + cols[None, :], mask=inside, other=0.0)
        G = tl.cumsum(limited(g), axis=0)
        tl.store(sums_ptr + (row[:, None] * H + h) * K + cols[None, :], G, mask=inside)


@triton.jit
def _spread(sums_ptr, G, real, cols, first, depth, H, h, K):
    # The strongest decay, as a logarithm, between two tokens of a block of 64 / 2^depth.
    r = tl.arange(0, 64)
    top = first.to(tl.int64) + ((r >> (6 - depth)) << (6 - depth))
    inside = real[:, None] & (cols < K)[None, :]
    begin = tl.load(sums_ptr + (top[:, None] * H + h) * K + cols[None, :], mask=inside, other=0.0)
    return tl.max(tl.where(inside, begin - G, 0.0))


@triton.jit(do_not_specialize=["B", "STEPS"])
def _within_kernel(
    v_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr, cu_ptr, sums_ptr,
    scores_ptr, pairs_ptr, w_ptr, u_ptr, qs_ptr, ks_ptr, bs_ptr, qf_ptr, kf_ptr, last_ptr, left_ptr,
    B, STEPS, H, GROUP, K, V, scale, low, high,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, a_t, a_h, b_t, b_h,
    RULE: tl.constexpr, GATE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPREAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    dtype = v_ptr.dtype.element_ty
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    i = sequence_of(cu_ptr, chunk, B, STEPS, 64)
    start = tl.load(cu_ptr + i)
    first = start + (chunk - start // 64 - i) * 64
    end = tl.load(cu_ptr + i + 1)
    if first >= end:
        return
    if left_ptr is not None:  # noqa: SIM102 - Triton evaluates both sides of `and`
        if tl.load(left_ptr + chunk * H + h) == 0:
            return
    r = tl.arange(0, 64)
    row = first.to(tl.int64) + r
    real = row < end
    final = tl.minimum(first + 64, end).to(tl.int64) - 1  # the chunk's last token
    lower = (r[:, None] >= r[None, :]) & real[:, None]
    strict = (r[:, None] > r[None, :]) & real[:, None]
    head = row * H + h
    # Gates of a head: G [64] and the step sizes
    if RULE == 3:
        dt = tl.load(g_ptr + row * g_t + h * g_h, mask=real, other=0.0).to(tl.float32)
        if HAS_BIAS:
            dt += tl.load(bias_ptr + h).to(tl.float32)
        dt = tl.where(real, tl.minimum(tl.maximum(softplus(dt), low), high), 0.0)
        g = limited(dt * tl.load(rate_ptr + h).to(tl.float32))
    elif GATE == 0:
        g = limited(tl.load(g_ptr + row * g_t + h * g_h, mask=real, other=0.0))
    elif GATE == 2:
        g = tl.where(real, limited(tl.load(g_ptr + h * g_t)), 0.0)
    scores = tl.zeros([64, 64], tl.float32)  # q . k
    if RULE == 1 or RULE == 2:
        system = tl.zeros([64, 64], tl.float32)  # k . k, or a . b
    if RULE == 2:
        pairs = tl.zeros([64, 64], tl.float32)  # q . b
        seen = tl.zeros([64, 64], tl.float32)  # a . k
    if NORMALIZE:
        qq = tl.zeros([64], tl.float32)
        kk = tl.zeros([64], tl.float32)
    for at in range(0, K, BLOCK_K):
        cols = at + tl.arange(0, BLOCK_K)
        inside = real[:, None] & (cols < K)[None, :]
        q = tl.load(q_ptr + row[:, None] * q_t + h // GROUP * q_h + cols[None, :], mask=inside, other=0.0).to(
            dtype
        )
        k = tl.load(k_ptr + row[:, None] * k_t + h // GROUP * k_h + cols[None, :], mask=inside, other=0.0).to(
            dtype
        )
        if NORMALIZE:
            qq += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
            kk += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        if GATE != 1:
            scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if RULE == 1:
                system += tl.dot(k, tl.trans(k), input_precision=PRECISION)
        else:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            sums_at = sums_ptr + (row[:, None] * H + h) * K + cols[None, :]
            G = tl.load(sums_at, mask=inside, other=0.0)
            diagonal = r[:, None] == r[None, :]
            scores += tl.where(diagonal, tl.sum(q * k, axis=1)[:, None], 0.0)
            if RULE == 2:
                a = tl.load(a_ptr + row[:, None] * a_t + h * a_h + cols[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
                b = tl.load(b_ptr + row[:, None] * b_t + h * b_h + cols[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
                g = limited(
                    tl.load(g_ptr + row[:, None] * g_t + h * g_h + cols[None, :], mask=inside, other=0.0)
                )
                pairs += tl.where(diagonal, tl.sum(q * b, axis=1)[:, None], 0.0)
            depth = first.to(tl.int32) * 0
            spread = _spread(sums_ptr, G, real, cols, first, depth, H, h, K)
            while (spread > SPREAD) & (depth < 6):
                depth += 1
                spread = _spread(sums_ptr, G, real, cols, first, depth, H, h, K)
            for level in range(depth):  # not unrolled: that takes ptxas a minute
                block = r >> (6 - level)
                border = first.to(tl.int64) + (block << (6 - level)) + (32 >> level) - 1
                met = tl.load(
                    sums_ptr + (border[:, None] * H + h) * K + cols[None, :],
                    mask=(border < end)[:, None] & (cols < K)[None, :], other=0.0,
                )  # fmt: skip
                upper = ((r >> (5 - level)) % 2 == 1)[:, None]
                together = block[:, None] == block[None, :]
                e = tl.exp(-tl.abs(G - met))
                q_up = tl.where(upper, q * e, 0.0).to(dtype)
                k_low = tl.trans(tl.where(upper, 0.0, k * e).to(dtype))
                scores += tl.where(together, tl.dot(q_up, k_low, input_precision=PRECISION), 0.0)
                if RULE == 1:
                    k_up = tl.where(upper, k * e, 0.0).to(dtype)
                    system += tl.where(together, tl.dot(k_up, k_low, input_precision=PRECISION), 0.0)
                if RULE == 2:
                    a_up = tl.where(upper, a * tl.exp(-tl.abs(G - g - met)), 0.0).to(dtype)
                    b_low = tl.trans(tl.where(upper, 0.0, b * e).to(dtype))
                    pairs += tl.where(together, tl.dot(q_up, b_low, input_precision=PRECISION), 0.0)
                    seen += tl.where(together, tl.dot(a_up, k_low, input_precision=PRECISION), 0.0)
                    system += tl.where(together, tl.dot(a_up, b_low, input_precision=PRECISION), 0.0)
            block = r >> (6 - depth)
            middle = tl.maximum((block << (6 - depth)) + (32 >> depth) - 1, 0)
            met = tl.load(
                sums_ptr + (tl.minimum(first.to(tl.int64) + middle, final)[:, None] * H + h) * K + cols[None, :],
                mask=(cols < K)[None, :], other=0.0,
            )  # fmt: skip
            together = (block[:, None] == block[None, :]) & strict
            e = tl.where(real[:, None], G - met, 0.0)
            q_here = (q * tl.exp(e)).to(dtype)
            k_there = tl.trans((k * tl.exp(-e)).to(dtype))
            scores += tl.where(together, tl.dot(q_here, k_there, input_precision=PRECISION), 0.0)
            if RULE == 1:
                k_here = (k * tl.exp(e)).to(dtype)
                system += tl.where(together, tl.dot(k_here, k_there, input_precision=PRECISION), 0.0)
            if RULE == 2:
                a_here = (a * tl.exp(e - g)).to(dtype)
                b_there = tl.trans((b * tl.exp(-e)).to(dtype))
                pairs += tl.where(together, tl.dot(q_here, b_there, input_precision=PRECISION), 0.0)
                seen += tl.where(together, tl.dot(a_here, k_there, input_precision=PRECISION), 0.0)
                system += tl.where(together, tl.dot(a_here, b_there, input_precision=PRECISION), 0.0)
            # With the decay from the chunk's beginning and to its end
            G_end = tl.load(sums_ptr + (final * H + h) * K + cols, mask=cols < K, other=0.0)
            tl.store(last_ptr + (chunk.to(tl.int64) * H + h) * K + cols, tl.exp(G_end), mask=cols < K)
            rest = tl.exp(G_end[None, :] - G)
            tl.store(qs_ptr + head[:, None] * K + cols[None, :], (q * tl.exp(G)).to(dtype), mask=inside)
            tl.store(ks_ptr + head[:, None] * K + cols[None, :], (k * rest).to(dtype), mask=inside)
            if RULE == 2:
                tl.store(bs_ptr + head[:, None] * K + cols[None, :], (b * rest).to(dtype), mask=inside)
    q_factor = tl.zeros([64], tl.float32) + scale
    k_factor = tl.zeros([64], tl.float32) + 1.0
    if NORMALIZE:
        q_factor *= tl.rsqrt(qq + 1e-6)
        k_factor *= tl.rsqrt(kk + 1e-6)
    scores *= q_factor[:, None] * k_factor[None, :]
    if RULE == 1:
        beta = tl.load(beta_ptr + row * beta_t + h * beta_h, mask=real, other=0.0).to(tl.float32)
        system *= (beta * k_factor)[:, None] * k_factor[None, :]
        k_system = beta * k_factor
    if GATE != 1:
        G = tl.cumsum(g, axis=0)
        decay = tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0))
        scores *= decay
        if RULE == 1:
            system *= decay
            k_system *= tl.exp(G)
        if RULE == 3:
            scores *= dt[None, :]
            k_factor *= dt
        q_factor *= tl.exp(G)
        k_factor *= tl.exp(tl.cumsum(g, axis=0, reverse=True) - g)
        tl.store(last_ptr + chunk.to(tl.int64) * H + h, tl.exp(tl.sum(g)))
    tl.store(qf_ptr + head, q_factor, mask=real)
    tl.store(kf_ptr + head, k_factor, mask=real)
    square_at = head[:, None] * 64 + r[None, :]
    tl.store(scores_ptr + square_at, tl.where(lower, scores, 0.0).to(dtype), mask=real[:, None])
    if RULE == 1:
        solved = inverse(tl.where(strict, system, 0.0), PRECISION).to(dtype)
        for at in range(0, K, BLOCK_K):
            cols = at + tl.arange(0, BLOCK_K)
            inside = real[:, None] & (cols < K)[None, :]
            k = tl.load(k_ptr + row[:, None] * k_t + h // GROUP * k_h + cols[None, :], mask=inside, other=0.0)
            k = k.to(tl.float32) * k_system[:, None]
            if GATE == 1:
                k *= tl.exp(
                    tl.load(sums_ptr + (row[:, None] * H + h) * K + cols[None, :], mask=inside, other=0.0)
                )
            w = -tl.dot(solved, k.to(dtype), input_precision=PRECISION)
            tl.store(w_ptr + head[:, None] * K + cols[None, :], w.to(dtype), mask=inside)
        for at in range(0, V, BLOCK_V):
            cols = at + tl.arange(0, BLOCK_V)
            inside = real[:, None] & (cols < V)[None, :]
            v = tl.load(v_ptr + row[:, None] * v_t + h * v_h + cols[None, :], mask=inside, other=0.0)
            u = tl.dot(solved, (v.to(tl.float32) * beta[:, None]).to(dtype), input_precision=PRECISION)
            tl.store(u_ptr + head[:, None] * V + cols[None, :], u.to(dtype), mask=inside)
    if RULE == 2:
        whole = inverse(tl.where(strict, -system, 0.0), PRECISION)
        solved = whole.to(dtype)
        kept = tl.dot(whole, tl.where(strict, seen, 0.0), input_precision=PRECISION).to(dtype)
        tl.store(pairs_ptr + square_at, tl.where(lower, pairs * scale, 0.0).to(dtype), mask=real[:, None])
        for at in range(0, K, BLOCK_K):
            cols = at + tl.arange(0, BLOCK_K)
            inside = real[:, None] & (cols < K)[None, :]
            a = tl.load(a_ptr + row[:, None] * a_t + h * a_h + cols[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            g = limited(tl.load(g_ptr + row[:, None] * g_t + h * g_h + cols[None, :], mask=inside, other=0.0))
            G = tl.load(sums_ptr + (row[:, None] * H + h) * K + cols[None, :], mask=inside, other=0.0)
            w = tl.dot(solved, (a * tl.exp(G - g)).to(dtype), input_precision=PRECISION)
            tl.store(w_ptr + head[:, None] * K + cols[None, :], w.to(dtype), mask=inside)
        for at in range(0, V, BLOCK_V):
            cols = at + tl.arange(0, BLOCK_V)
            inside = real[:, None] & (cols < V)[None, :]
            v = tl.load(v_ptr + row[:, None] * v_t + h * v_h + cols[None, :], mask=inside, other=0.0).to(
                dtype
            )
            u = tl.dot(kept, v, input_precision=PRECISION)
            tl.store(u_ptr + head[:, None] * V + cols[None, :], u.to(dtype), mask=inside)


@triton.jit
def _between_kernel(
    v_ptr, q_ptr, k_ptr, b_ptr, skip_ptr, scores_ptr, pairs_ptr, w_ptr, u_ptr, qf_ptr, kf_ptr, last_ptr,
    state_ptr, cu_ptr, slots_ptr, fresh_ptr, out_ptr, H, GROUP, K, V,
    q_t, q_h, k_t, k_h, v_t, v_h, s_s, s_h, s_k, s_v,
    RULE: tl.constexpr, GATE: tl.constexpr, HAS_SKIP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    dtype = v_ptr.dtype.element_ty
    parts = tl.cdiv(V, BLOCK_V)
    i = tl.program_id(0) // (parts * H)
    h = tl.program_id(0) // parts % H
    r = tl.arange(0, 64)
    keys = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    key, value = keys < K, cols < V
    start, count, slot, known = sequence_at(i, cu_ptr, slots_ptr, fresh_ptr)
    end = start + count
    state_at = state_ptr + slot * s_s + h * s_h + keys[:, None] * s_k + cols[None, :] * s_v
    inside = key[:, None] & value[None, :]
    s = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)  # [K, V]
    chunk = start // 64 + i
    if HAS_SKIP:
        skip = tl.load(skip_ptr + h).to(tl.float32)
    for first in range(start, end, 64):
        row = first + r
        real = row < end
        head = row * H + h
        of_keys = real[:, None] & key[None, :]
        of_values = real[:, None] & value[None, :]
        q = tl.load(
            q_ptr + row[:, None] * q_t + h // GROUP * q_h + keys[None, :], mask=of_keys, other=0.0
        ).to(dtype)
        k = tl.load(
            k_ptr + row[:, None] * k_t + h // GROUP * k_h + keys[None, :], mask=of_keys, other=0.0
        ).to(dtype)
        scores = tl.load(scores_ptr + head[:, None] * 64 + r[None, :], mask=real[:, None], other=0.0)
        q_factor = tl.load(qf_ptr + head, mask=real, other=0.0)
        k_factor = tl.load(kf_ptr + head, mask=real, other=0.0)
        before = s.to(dtype)
        o = tl.dot(q, before, input_precision=PRECISION) * q_factor[:, None]
        if RULE != 1:
            v = tl.load(v_ptr + row[:, None] * v_t + h * v_h + cols[None, :], mask=of_values, other=0.0).to(
                dtype
            )
        if RULE == 1 or RULE == 2:
            w = tl.load(w_ptr + head[:, None] * K + keys[None, :], mask=of_keys, other=0.0)
            u = tl.load(u_ptr + head[:, None] * V + cols[None, :], mask=of_values, other=0.0).to(tl.float32)
            x = u + tl.dot(w, before, input_precision=PRECISION)
        else:
            x = v.to(tl.float32)
        if GATE == 1:
            s *= tl.load(last_ptr + (chunk * H + h) * K + keys, mask=key, other=0.0)[:, None]
        else:
            s *= tl.load(last_ptr + chunk * H + h)
        if RULE == 2:
            pairs = tl.load(pairs_ptr + head[:, None] * 64 + r[None, :], mask=real[:, None], other=0.0)
            b = tl.load(b_ptr + head[:, None] * K + keys[None, :], mask=of_keys, other=0.0)
            o += tl.dot(scores, v, input_precision=PRECISION) + tl.dot(
                pairs, x.to(dtype), input_precision=PRECISION
            )
            s += tl.dot(tl.trans(k), v, input_precision=PRECISION)
            s += tl.dot(tl.trans(b), x.to(dtype), input_precision=PRECISION)
        else:
            o += tl.dot(scores, x.to(dtype), input_precision=PRECISION)
            s += tl.dot(tl.trans(k), (x * k_factor[:, None]).to(dtype), input_precision=PRECISION)
        if HAS_SKIP:
            o += v.to(tl.float32) * skip
        tl.store(out_ptr + head[:, None] * V + cols[None, :], o.to(out_ptr.dtype.element_ty), mask=of_values)
        chunk += 1
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside & (slot > 0))


def run(p: Problem, out: torch.Tensor, halved: bool = False) -> None:
    """Fill `out` [T, H, V], contiguous, and the states. halved: without `products_kernel`."""
    batch, heads, group, keys, values = p.sizes
    tokens, device, dtype = p.v.shape[0], p.v.device, p.v.dtype
    chunks, steps = tokens // CHUNK + batch, batch.bit_length()
    by_channel = p.gate == BY_CHANNEL

    def scratch(*shape: int, when: bool = True, dtype: torch.dtype = dtype) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if when else None

    corrects, f32 = p.rule in (DELTA, PAIR), torch.float32
    sums = scratch(tokens, heads, keys, when=by_channel, dtype=f32)
    scores = scratch(tokens, heads, CHUNK)
    pairs = scratch(tokens, heads, CHUNK, when=p.rule == PAIR)
    w, u = scratch(tokens, heads, keys, when=corrects), scratch(tokens, heads, values, when=corrects)
    q, k = (scratch(tokens, heads, keys, when=by_channel) for _ in range(2))
    b = scratch(tokens, heads, keys, when=p.rule == PAIR)
    q_factor, k_factor = (scratch(tokens, heads, dtype=f32) for _ in range(2))
    last = scratch(chunks, heads, keys if by_channel else 1, dtype=f32)
    # In narrower products with the inverse, ptxas 12.8 takes a wrong register for the descriptor of shared memory.
    least = 64 if p.rule == DELTA else 16
    block_k, block_v = (min(64, max(least, next_power_of_2(n))) for n in (keys, values))
    exact = dtype == torch.float32
    shared: dict[str, Any] = {"RULE": p.rule, "GATE": p.gate, "PRECISION": "tf32x3" if exact else "tf32"}
    whole = (p.rule == DELTA or (p.rule == LINEAR and by_channel)) and not halved
    whole = whole and not (by_channel and dtype == torch.float16)  # whose numbers end at 65,504
    left = scratch(chunks, heads, when=whole and by_channel, dtype=torch.int8)
    if whole:
        launch_kernel(
            products_kernel, (chunks, heads), p.v, p.q, p.k, p.g, p.beta, p.cu_seqlens,
            scores, w, u, q, k, q_factor, k_factor, last, left, batch, steps, heads, group, keys, values, p.scale,
            *strides(p.q, 2), *strides(p.k, 2), *strides(p.v, 2), *strides(p.g, 2), *strides(p.beta, 2),
            CORRECTS=corrects, CHANNELS=by_channel, NORMALIZE=p.normalize, SPREAD=120.0, BLOCK_V=block_v,
            PRECISION=shared["PRECISION"], num_stages=1, **products_tile(p),
        )  # fmt: skip
    if sums is not None:
        launch_kernel(
            _sums_kernel, (chunks, heads), p.g, sums, left, p.cu_seqlens, batch, steps, heads, keys, *strides(p.g, 2),
            BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
    if by_channel or not whole:
        launch_kernel(
            _within_kernel, (chunks, heads),
            p.v, p.q, p.k, p.g, p.beta, p.a, p.b, p.rate, p.bias, p.cu_seqlens, sums,
            scores, pairs, w, u, q, k, b, q_factor, k_factor, last, left,
            batch, steps, heads, group, keys, values, p.scale, p.low, p.high,
            *strides(p.q, 2), *strides(p.k, 2), *strides(p.v, 2), *strides(p.g, 2), *strides(p.beta, 2),
            *strides(p.a, 2), *strides(p.b, 2),
            NORMALIZE=p.normalize, HAS_BIAS=p.bias is not None, SPREAD=6 if dtype == torch.float16 else 40,
            BLOCK_K=min(block_k, 32) if p.rule == PAIR else block_k, BLOCK_V=block_v, num_stages=1,
            num_warps=8 if p.rule == PAIR or (exact and by_channel) else 4, **shared,
        )  # fmt: skip
    if q is None or k is None:
        q, k = p.q, p.k
    else:
        group = 1
    block_k = max(16, next_power_of_2(keys))
    block_v, stages, warps = _tile_between(p)
    launch_kernel(
        _between_kernel, (batch * heads * cdiv(values, block_v),),
        p.v, q, k, b, p.skip, scores, pairs, w, u, q_factor, k_factor, last,
        p.state, p.cu_seqlens, p.slots, p.fresh, out, heads, group, keys, values,
        *strides(q, 2), *strides(k, 2), *strides(p.v, 2), *p.state.stride(),
        HAS_SKIP=p.skip is not None, BLOCK_K=block_k, BLOCK_V=block_v, num_stages=stages,
        num_warps=warps, **shared,
    )  # fmt: skip


def products_tile(p: Problem) -> dict[str, int]:
    """BLOCK_K and warps of `products_kernel`. With decays for each channel, 64 keys spill registers on sm_90."""
    most = 32 if p.gate == BY_CHANNEL else 64
    return {
        "BLOCK_K": min(most, max(16, next_power_of_2(p.sizes[3]))),
        "num_warps": 8 if p.v.itemsize == 4 else 4,
    }


def _tile_between(p: Problem) -> tuple[int, int, int]:
    """(channels of the values, stages, warps) of a program of `_between_kernel`, from sweeps on an H200.

    A stage has tiles of queries, keys and the chunk's solutions: with wide ones only two fit.
    """
    batch, heads, _, keys, values = p.sizes
    programs, sms = batch * heads * cdiv(values, 64), multiprocessors(p.v.device)
    most = max(16, next_power_of_2(values))
    if p.v.itemsize == 4 or keys > 128:
        narrow = 32 if p.v.itemsize == 4 else 16
        return (min(64, most), 2, 8) if programs >= sms else (min(narrow, most), 2, 4)
    wide = 5 * programs >= 3 * sms
    deep = p.rule == DELTA or (p.rule != PAIR and wide and programs <= sms)
    return min(64 if wide else 32, most), 3 if deep else 2, 4


def in_chunks(p: Problem) -> bool:
    """Whether prompts run in chunks, rather than token by token as decodes and short sequences do."""
    return p.v.shape[0] >= LEAST * p.sizes[0]


def way_of(p: Problem) -> Callable[[Problem, torch.Tensor], None]:
    """The kernels of a problem: shapes alone decide."""
    if not in_chunks(p):
        return recurrent.run
    return linear_chunks.run if linear_chunks.supports(p) else run


def solve(p: Problem) -> torch.Tensor:
    """The outputs [T, H, V]."""
    out = result_like(p.v)
    batch, heads, _, _, values = p.sizes
    if batch * heads * values:
        way_of(p)(p, out)
    return out
