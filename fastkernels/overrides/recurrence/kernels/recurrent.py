"""Token by token: a program has a head of a sequence and some channels of its values. Their state is in registers.

A decode reads and writes each state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence.kernels.problem import (
    Problem,
    log_decay,
    sequence_at,
    softplus,
    strides,
)


@triton.jit
def _recurrent_kernel(
    v_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr, skip_ptr, state_ptr, cu_ptr, slots_ptr,
    fresh_ptr, out_ptr, scale, low, high,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, a_t, a_h, b_t, b_h, s_s, s_h, s_k, s_v,
    RULE: tl.constexpr, GATE: tl.constexpr, NORMALIZE: tl.constexpr, LOGARITHM: tl.constexpr, BOUNDED: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Sizes are constants: a decode waits for divisions by others before its first read.
    follow(OVERLAP)
    parts = tl.cdiv(V, BLOCK_V)  # of a state, by programs that follow each other: their rows are read at once
    i = tl.program_id(0) // (parts * H)
    h = tl.program_id(0) // parts % H
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    key, value = rows < K, cols < V
    inside = key[:, None] & value[None, :]
    start, count, slot, known = sequence_at(i, cu_ptr, slots_ptr, fresh_ptr)
    state_at = state_ptr + slot * s_s + h * s_h + rows[:, None] * s_k + cols[None, :] * s_v
    s = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)  # [K, V]
    q_at = q_ptr + start * q_t + h // GROUP * q_h + rows
    k_at = k_ptr + start * k_t + h // GROUP * k_h + rows
    v_at = v_ptr + start * v_t + h * v_h + cols
    out_at = out_ptr + (start * H + h) * V + cols
    g_at = g_ptr + start * g_t + h * g_h
    if GATE == 1:
        g_at = g_at + rows
    if GATE == 2:
        decay = tl.exp(tl.load(g_ptr + h * g_t).to(tl.float32))
    if RULE == 1:
        beta_at = beta_ptr + start * beta_t + h * beta_h
    if RULE == 2:
        a_at = a_ptr + start * a_t + h * a_h + rows
        b_at = b_ptr + start * b_t + h * b_h + rows
    if rate_ptr is not None:
        rate = tl.load(rate_ptr + h).to(tl.float32)
    if bias_ptr is not None:
        if GATE == 1:
            bias = tl.load(bias_ptr + h * K + rows, mask=key, other=0.0).to(tl.float32)
        else:
            bias = tl.load(bias_ptr + h).to(tl.float32)
    for _ in range(0, count):
        q = tl.load(q_at, mask=key, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=key, other=0.0).to(tl.float32)
        v = tl.load(v_at, mask=value, other=0.0).to(tl.float32)
        if NORMALIZE:
            q *= tl.rsqrt(tl.sum(q * q) + 1e-6)
            k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        if RULE == 2:
            a = tl.load(a_at, mask=key, other=0.0).to(tl.float32)
            b = tl.load(b_at, mask=key, other=0.0).to(tl.float32)
            found = tl.sum(s * a[:, None], axis=0)
        if GATE != 2:
            if GATE == 1:
                g = tl.load(g_at, mask=key, other=0.0).to(tl.float32)
            else:
                g = tl.load(g_at).to(tl.float32)
            if bias_ptr is not None:
                g += bias
            if RULE == 3:
                dt = tl.minimum(tl.maximum(softplus(g), low), high)
                g = dt * rate
            elif rate_ptr is not None:
                g = log_decay(g, rate, low, LOGARITHM, BOUNDED)
            decay = tl.exp(g)
        if GATE == 1:
            s *= decay[:, None]
        else:
            s *= decay
        if RULE == 1:
            # The output reads the state before it is corrected, so that both sums are computed at once.
            beta = tl.load(beta_at).to(tl.float32)
            if rate_ptr is not None:
                beta = 1.0 / (1.0 + tl.exp(-beta))
            new = (v - tl.sum(s * k[:, None], axis=0)) * beta
            o = tl.sum(s * q[:, None], axis=0) + tl.sum(q * k) * new
        elif RULE == 3:
            new = v * dt
        else:
            new = v
        s += k[:, None] * new[None, :]
        if RULE == 2:
            s += b[:, None] * found[None, :]
        if RULE != 1:
            o = tl.sum(s * q[:, None], axis=0)
        o *= scale
        if skip_ptr is not None:
            o += v * tl.load(skip_ptr + h).to(tl.float32)
        tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=value)
        q_at += q_t
        k_at += k_t
        v_at += v_t
        out_at += H * V
        if GATE != 2:
            g_at += g_t
        if RULE == 1:
            beta_at += beta_t
        if RULE == 2:
            a_at += a_t
            b_at += b_t
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside & (slot > 0))


def tile_of(p: Problem) -> tuple[int, int]:
    """(channels of the values, warps) of a program, from sweeps on an H200 with states in float32 (2026-11-29).

    A warp has at most 4,096 numbers of a state, or registers spill. Programs of one warp wait for no other warp, but a
    row of few values is a bad access to memory. With contiguous keys it is none: few sequences are cut into programs of
    fewer values, whose warp has half of the instructions (648 of 968 for the gated delta rule in bfloat16, sm_90). The
    gated delta rule in float32 takes 32 values: 38 us in place of 46 for 32 sequences of Qwen3-Next (2026-11-30).
    Mamba-2 in half precision takes 8: 24 us in place of 27 for 32 sequences of Mamba-2 2.7B (2026-12-01).
    """
    batch, heads, _, keys, values = p.sizes
    keys = next_power_of_2(keys)
    of_keys = p.state.stride(2) == 1 and p.state.stride(3) != 1  # keys are contiguous: as Mamba-2 of vLLM
    wide = of_keys and p.rule == 1 and p.gate == 0 and p.state.dtype == torch.float32
    narrow = of_keys and p.rule == 3 and p.state.itemsize == 2
    block = min(32 if wide else 8 if narrow else 16 if of_keys else 64, next_power_of_2(values))
    least, programs = (4, 3) if of_keys else (16, 4)  # for each multiprocessor
    while block > least and batch * heads * cdiv(values, block) < programs * multiprocessors(p.v.device):
        block //= 2
    if of_keys:
        return block, 1 if keys <= 128 else 2
    if block == 64 and keys <= 64:
        return 32, 4
    if block == 64:
        return 64, keys // 64
    return block, 4 if block == 32 else max(keys * block // 2048, 1)


def run(p: Problem, out: torch.Tensor) -> None:
    """Fill `out` [T, H, V], contiguous, and the states."""
    batch, heads, group, keys, values = p.sizes
    block, warps = tile_of(p)
    launch_kernel(
        _recurrent_kernel, (batch * heads * cdiv(values, block),),
        p.v, p.q, p.k, p.g, p.beta, p.a, p.b, p.rate, p.bias, p.skip, p.state, p.cu_seqlens, p.slots, p.fresh, out,
        p.scale, p.low, p.high,
        *strides(p.q, 2), *strides(p.k, 2), *strides(p.v, 2), *strides(p.g, 2), *strides(p.beta, 2), *strides(p.a, 2),
        *strides(p.b, 2), *p.state.stride(),
        RULE=p.rule, GATE=p.gate, NORMALIZE=p.normalize, LOGARITHM=p.logarithm, BOUNDED=p.low != 0.0,
        H=heads, GROUP=group, K=keys, V=values, BLOCK_K=next_power_of_2(keys), BLOCK_V=block, num_warps=warps,
    )  # fmt: skip
