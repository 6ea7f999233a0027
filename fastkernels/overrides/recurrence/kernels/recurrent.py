"""Token by token: a program has a head of a sequence and some channels of its values. Their state is in registers.

A decode reads and writes each state once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence.kernels.constants import is_each, is_none
from fastkernels.overrides.recurrence.kernels.problem import Problem, softplus, strides

PROGRAMS = 4  # for each multiprocessor, before a program gets more channels


@triton.jit
def _recurrent_kernel(
    v_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, a_ptr, b_ptr, rate_ptr, bias_ptr, skip_ptr, state_ptr, cu_ptr, slots_ptr,
    fresh_ptr, out_ptr, H, GROUP, K, V, scale, low, high,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, a_t, a_h, b_t, b_h, s_s, s_h, s_k, s_v,
    RULE: tl.constexpr, GATE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr,
    ONE: tl.constexpr, OLD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    parts = tl.cdiv(V, BLOCK_V)  # of a state, by programs that follow each other: their rows are read at once
    i = tl.program_id(0) // (parts * H)
    h = tl.program_id(0) // parts % H
    rows = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    key, value = rows < K, cols < V
    inside = key[:, None] & value[None, :]
    if ONE:  # token of each sequence
        start = i.to(tl.int64)
        count = 1
    else:
        start = tl.load(cu_ptr + i).to(tl.int64)
        count = (tl.load(cu_ptr + i + 1) - start).to(tl.int32)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    known = slot > 0
    if not OLD:
        known = known & (tl.load(fresh_ptr + i) == 0)
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
    if RULE == 3:
        rate = tl.load(rate_ptr + h).to(tl.float32)
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
        if RULE == 3:
            dt = tl.load(g_at).to(tl.float32)
            if HAS_BIAS:
                dt += tl.load(bias_ptr + h).to(tl.float32)
            dt = tl.minimum(tl.maximum(softplus(dt), low), high)
            s *= tl.exp(dt * rate)
        elif GATE == 0:
            s *= tl.exp(tl.load(g_at).to(tl.float32))
        elif GATE == 1:
            s *= tl.exp(tl.load(g_at, mask=key, other=0.0).to(tl.float32))[:, None]
        else:
            s *= decay
        if RULE == 1:
            new = (v - tl.sum(s * k[:, None], axis=0)) * tl.load(beta_at).to(tl.float32)
        elif RULE == 3:
            new = v * dt
        else:
            new = v
        s += k[:, None] * new[None, :]
        if RULE == 2:
            s += b[:, None] * found[None, :]
        o = scale * tl.sum(s * q[:, None], axis=0)
        if HAS_SKIP:
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
    row of few values is a bad access to memory.
    """
    batch, heads, _, keys, values = p.sizes
    keys = next_power_of_2(keys)
    block = min(64, next_power_of_2(values))
    while block > 16 and batch * heads * cdiv(values, block) < PROGRAMS * multiprocessors(p.v.device):
        block //= 2
    if p.state.stride(2) == 1 and p.state.stride(3) != 1:  # keys are contiguous: as Mamba-2 of vLLM
        return min(block, 16), 1 if keys <= 128 else 2
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
        heads, group, keys, values, p.scale, p.low, p.high,
        *strides(p.q, 2), *strides(p.k, 2), *strides(p.v, 2), *strides(p.g, 2), *strides(p.beta, 2), *strides(p.a, 2),
        *strides(p.b, 2), *p.state.stride(),
        RULE=p.rule, GATE=p.gate, NORMALIZE=p.normalize, HAS_BIAS=p.bias is not None, HAS_SKIP=p.skip is not None,
        ONE=is_each(p.cu_seqlens), OLD=is_none(p.fresh),
        BLOCK_K=next_power_of_2(keys), BLOCK_V=block, num_warps=warps,
    )  # fmt: skip
