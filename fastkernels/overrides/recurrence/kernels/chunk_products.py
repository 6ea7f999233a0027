"""Within a chunk of a delta rule, or of any with a decay for each channel: all pairs of tokens are one product.

With a decay for each channel, exp(G_i - G_j) = exp(G_i - m) exp(m - G_j), where m is half of the chunk's whole decay:
the factors are within exp(-SPREAD / 2) and exp(SPREAD / 2). A chunk with stronger decays is noted in `left`, and the
kernels of `chunks` halve it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastkernels.overrides.kit.overlap import follow
from fastkernels.overrides.recurrence.kernels.chunk_parts import LOG2E, inverse, limited, sequence_of


@triton.jit(do_not_specialize=["B", "STEPS"])
def products_kernel(
    v_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, cu_ptr, scores_ptr, w_ptr, u_ptr, qs_ptr, ks_ptr, qf_ptr, kf_ptr, last_ptr,
    left_ptr, B, STEPS, H, GROUP, K, V, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h,
    CORRECTS: tl.constexpr, CHANNELS: tl.constexpr, NORMALIZE: tl.constexpr, SPREAD: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
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
    r = tl.arange(0, 64)
    row = first.to(tl.int64) + r
    real = row < end
    head = row * H + h
    scores = tl.zeros([64, 64], tl.float32)  # q . k
    system = tl.zeros([64, 64], tl.float32)  # k . k
    if NORMALIZE:
        qq = tl.zeros([64], tl.float32)
        kk = tl.zeros([64], tl.float32)
    if CHANNELS:
        strongest = tl.zeros([BLOCK_K], tl.float32)
    for at in range(0, K, BLOCK_K):
        cols = at + tl.arange(0, BLOCK_K)
        inside = real[:, None] & (cols < K)[None, :]
        q = tl.load(q_ptr + row[:, None] * q_t + h // GROUP * q_h + cols[None, :], mask=inside, other=0.0)
        k = tl.load(k_ptr + row[:, None] * k_t + h // GROUP * k_h + cols[None, :], mask=inside, other=0.0)
        if NORMALIZE:
            qq += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
            kk += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        if CHANNELS:
            g = tl.load(g_ptr + row[:, None] * g_t + h * g_h + cols[None, :], mask=inside, other=0.0)
            g = limited(g) * LOG2E
            G = tl.cumsum(g, axis=0)
            half = 0.5 * tl.sum(g, axis=0)
            strongest = tl.maximum(strongest, -half)
            border = tl.exp2(half)
            e = tl.exp2(G - half[None, :])
            k_there = k.to(tl.float32) * tl.exp2(half[None, :] - G)
            q_here = q.to(tl.float32) * e
            there = tl.trans(k_there.to(dtype))
            scores += tl.dot(q_here.to(dtype), there, input_precision=PRECISION)
            # With the decay from the chunk's beginning and to its end; w has the keys of its product until then
            wide = head[:, None] * K + cols[None, :]
            tl.store(qs_ptr + wide, (q_here * border[None, :]).to(dtype), mask=inside)
            tl.store(ks_ptr + wide, (k_there * border[None, :]).to(dtype), mask=inside)
            if CORRECTS:
                k_here = k.to(tl.float32) * e
                system += tl.dot(k_here.to(dtype), there, input_precision=PRECISION)
                tl.store(w_ptr + wide, (k_here * border[None, :]).to(dtype), mask=inside)
            tl.store(last_ptr + (chunk.to(tl.int64) * H + h) * K + cols, border * border, mask=cols < K)
        else:
            q, k = q.to(dtype), k.to(dtype)
            scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
            system += tl.dot(k, tl.trans(k), input_precision=PRECISION)
    if CHANNELS:
        left = 2.0 * tl.max(strongest) > SPREAD * LOG2E
        tl.store(left_ptr + chunk * H + h, left.to(tl.int8))
        if left:
            return
    q_factor = tl.zeros([64], tl.float32) + scale
    k_factor = tl.zeros([64], tl.float32) + 1.0
    if NORMALIZE:
        q_factor *= tl.rsqrt(qq + 1e-6)
        k_factor *= tl.rsqrt(kk + 1e-6)
    lower = (r[:, None] >= r[None, :]) & real[:, None]
    scores = tl.where(lower, scores * q_factor[:, None] * k_factor[None, :], 0.0)
    scores_at = scores_ptr + head[:, None] * 64 + r[None, :]
    if CORRECTS:
        beta = tl.load(beta_ptr + row * beta_t + h * beta_h, mask=real, other=0.0).to(tl.float32)
        k_system = beta * k_factor
        strict = (r[:, None] > r[None, :]) & real[:, None]
        system = tl.where(strict, system * k_system[:, None] * k_factor[None, :], 0.0)
        if not CHANNELS:
            g = limited(tl.load(g_ptr + row * g_t + h * g_h, mask=real, other=0.0)) * LOG2E
            G = tl.cumsum(g, axis=0)
            decay = tl.exp2(tl.where(lower, G[:, None] - G[None, :], 0.0))
            scores *= decay
            system *= decay
            k_system *= tl.exp2(G)
            q_factor *= tl.exp2(G)
            k_factor *= tl.exp2(tl.cumsum(g, axis=0, reverse=True) - g)  # exact for strong decays, too
            tl.store(last_ptr + chunk.to(tl.int64) * H + h, tl.exp2(tl.sum(g)))
    tl.store(qf_ptr + head, q_factor, mask=real)
    tl.store(kf_ptr + head, k_factor, mask=real)
    tl.store(scores_at, scores.to(dtype), mask=real[:, None])
    if CORRECTS:
        solved = inverse(system, PRECISION)
        of_keys = (solved * -k_system[None, :]).to(dtype)
        of_values = (solved * beta[None, :]).to(dtype)
        if CHANNELS:
            tl.debug_barrier()  # the keys that other threads stored
        for at in range(0, K, BLOCK_V):
            cols = at + tl.arange(0, BLOCK_V)
            inside = real[:, None] & (cols < K)[None, :]
            wide = head[:, None] * K + cols[None, :]
            if CHANNELS:
                k = tl.load(w_ptr + wide, mask=inside, other=0.0)
            else:
                k = tl.load(
                    k_ptr + row[:, None] * k_t + h // GROUP * k_h + cols[None, :], mask=inside, other=0.0
                )
            w = tl.dot(of_keys, k.to(dtype), input_precision=PRECISION)
            tl.store(w_ptr + wide, w.to(dtype), mask=inside)
        for at in range(0, V, BLOCK_V):
            cols = at + tl.arange(0, BLOCK_V)
            inside = real[:, None] & (cols < V)[None, :]
            v = tl.load(v_ptr + row[:, None] * v_t + h * v_h + cols[None, :], mask=inside, other=0.0)
            u = tl.dot(of_values, v, input_precision=PRECISION)
            tl.store(u_ptr + head[:, None] * V + cols[None, :], u.to(dtype), mask=inside)
