"""Rules that correct nothing, with one decay for each head (SSD): one kernel has a chunk's pairs and its state.

Few sequences leave multiprocessors idle. These are cut into segments, in three launches: the state that each segment
adds to zero, the states at their beginnings, and the outputs.

Heads that share queries and keys share the products of both, too: the first launch computes them once for a group.
Counted for Mamba-2 2.7B in bfloat16 (80 heads of one group), with reads and writes of the L2 cache:

    prompts                          products by head              products by group
    8,192 tokens, in segments        48.3 GFLOP, 0.77 GB, 289 us   37.7 GFLOP, 0.85 GB, 266 us
    32 packed of 100 to 4,000        289 GFLOP, 3.93 GB, 1,276 us  208 GFLOP, 4.62 GB, 1,239 us

The times are those of an H200 (docs/reports/2026-11-30-h200-convolutions.md).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.recurrence.kernels.chunk_parts import LOG2E, limited, sequence_of
from fastkernels.overrides.recurrence.kernels.problem import (
    BY_CHANNEL,
    LINEAR,
    STEP,
    Problem,
    slot_at,
    softplus,
    strides,
)

WHOLE, STATES, OUTPUTS = 0, 1, 2  # what a launch computes
RESIDENT = 2  # programs of a multiprocessor at a time
SHORTEST = 256  # tokens of a segment
SHARING = 4  # heads of a group, at least, that read the group's products instead of computing them


@triton.jit
def _store_pairs(
    q_ptr, k_ptr, pairs_ptr, row, end, chunk, group, GROUPS, K, q_t, q_h, k_t, k_h,
    BLOCK_K: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # q k^T of a chunk and a group [N, G, 64, 64]; in float32 for float16 (HALF), which products before decays exceed.
    dtype = tl.float16 if HALF else pairs_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_K)
    inside = (row < end)[:, None] & (cols < K)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_t + group * q_h + cols[None, :], mask=inside, other=0.0).to(dtype)
    k = tl.load(k_ptr + row[:, None] * k_t + group * k_h + cols[None, :], mask=inside, other=0.0).to(dtype)
    pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    r = tl.arange(0, 64)
    at = (chunk.to(tl.int64) * GROUPS + group) * 4096 + r[:, None] * 64 + r[None, :]
    tl.store(pairs_ptr + at, pairs.to(pairs_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["B", "STEPS"])
def _decays_kernel(
    g_ptr, rate_ptr, bias_ptr, cu_ptr, since_ptr, dt_ptr, until_ptr, q_ptr, k_ptr, pairs_ptr, B, STEPS, H, GROUPS, K,
    low, high, g_t, g_h, q_t, q_h, k_t, k_h, RULE: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # For the tokens of each chunk [N, H, 64]: the logarithm to base 2 of the decay since the chunk's beginning, the
    # step size, and the step size times the decay until the chunk's end. With pairs, the first GROUPS programs of a
    # chunk compute them.
    follow(OVERLAP)
    chunk = tl.program_id(0)
    i = sequence_of(cu_ptr, chunk, B, STEPS, 64)
    start = tl.load(cu_ptr + i)
    first = start + (chunk - start // 64 - i) * 64
    end = tl.load(cu_ptr + i + 1)
    if first >= end:
        return
    row = first.to(tl.int64) + tl.arange(0, 64)
    part = tl.program_id(1)
    if pairs_ptr is not None:
        if part < GROUPS:
            _store_pairs(
                q_ptr, k_ptr, pairs_ptr, row, end, chunk, part, GROUPS, K, q_t, q_h, k_t, k_h, BLOCK_K, HALF, PRECISION
            )  # fmt: skip
            return
        part -= GROUPS
    h = part * BLOCK + tl.arange(0, BLOCK)
    inside = (row < end)[:, None] & (h < H)[None, :]
    dt = tl.full([64, BLOCK], 1.0, tl.float32)
    if RULE == 3:
        dt = tl.load(g_ptr + row[:, None] * g_t + h[None, :] * g_h, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            dt += tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        dt = tl.minimum(tl.maximum(softplus(dt), low), high)
        rate = tl.load(rate_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        g = limited(dt * rate[None, :])
    elif GATE == 0:
        g = limited(tl.load(g_ptr + row[:, None] * g_t + h[None, :] * g_h, mask=inside, other=0.0))
    else:
        g = limited(tl.load(g_ptr + h * g_t, mask=h < H, other=0.0))[None, :] + tl.zeros(
            [64, BLOCK], tl.float32
        )
    g = tl.where(inside, g, 0.0) * LOG2E
    since = tl.cumsum(g, axis=0)
    until = tl.cumsum(g, axis=0, reverse=True) - g  # exact for strong decays, too
    at = (chunk.to(tl.int64) * H + h)[None, :] * 64 + tl.arange(0, 64)[:, None]
    head = (h < H)[None, :]
    tl.store(since_ptr + at, since, mask=head)
    if RULE == 3:
        tl.store(dt_ptr + at, dt, mask=head)
    tl.store(until_ptr + at, tl.exp2(until) * dt, mask=head)


@triton.jit(do_not_specialize=["B", "STEPS", "SEGMENT"])
def linear_kernel(
    v_ptr, q_ptr, k_ptr, pairs_ptr, since_ptr, dt_ptr, until_ptr, skip_ptr, state_ptr, cu_ptr, slots_ptr, fresh_ptr,
    out_ptr, segment_ptr, decay_ptr, B, STEPS, SEGMENT, H, GROUP, K, V, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, s_s, s_h, s_k, s_v,
    HAS_STEPS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_SCALE: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    dtype = v_ptr.dtype.element_ty
    parts = tl.cdiv(V, BLOCK_V)
    piece = tl.program_id(0) // (parts * H)
    h = tl.program_id(0) // parts % H
    i = piece
    if PART != 0:
        i = sequence_of(cu_ptr, piece, B, STEPS, SEGMENT)
    start = tl.load(cu_ptr + i)
    begin = start
    end = tl.load(cu_ptr + i + 1)
    if PART != 0:
        begin += (piece - start // SEGMENT - i) * SEGMENT
        if begin >= end:
            return
        end = tl.minimum(begin + SEGMENT, end)
    r = tl.arange(0, 64)
    keys = tl.arange(0, BLOCK_K)
    cols = tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    key, value = keys < K, cols < V
    inside = key[:, None] & value[None, :]
    slot, known = slot_at(i, slots_ptr, fresh_ptr)
    state_at = state_ptr + slot * s_s + h * s_h + keys[:, None] * s_k + cols[None, :] * s_v
    if PART != 0:
        segment_at = segment_ptr + (piece.to(tl.int64) * H + h) * K * V + keys[:, None] * V + cols[None, :]
    if PART == 0:
        s = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)  # [K, V]
    elif PART == 1:
        s = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    else:
        s = tl.load(segment_at, mask=inside, other=0.0)
    if HAS_SKIP:
        skip = tl.load(skip_ptr + h).to(tl.float32)
    # Addresses of the first chunk: later ones are at the same distances
    q_at = q_ptr + begin.to(tl.int64) * q_t + h // GROUP * q_h
    k_at = k_ptr + begin.to(tl.int64) * k_t + h // GROUP * k_h
    v_at = v_ptr + begin.to(tl.int64) * v_t + h * v_h
    out_at = out_ptr + (begin.to(tl.int64) * H + h) * V
    chunk = (start // 64 + i + (begin - start) // 64).to(tl.int64)
    step_at = (chunk * H + h) * 64
    if pairs_ptr is not None:
        pairs_at = pairs_ptr + (chunk * (H // GROUP) + h // GROUP) * 4096
    whole = 0.0
    for first in range(begin, end, 64):
        real = (first + r < end)[:, None]
        of_keys, of_values = real, real
        if not EVEN:
            of_keys = real & key[None, :]
            of_values = real & value[None, :]
        k = tl.load(k_at + r[:, None] * k_t + keys[None, :], mask=of_keys, other=0.0).to(dtype)
        v = tl.load(v_at + r[:, None] * v_t + cols[None, :], mask=of_values, other=0.0)
        total = tl.load(since_ptr + step_at + 63)
        if PART != 1:
            q = tl.load(q_at + r[:, None] * q_t + keys[None, :], mask=of_keys, other=0.0).to(dtype)
            since = tl.load(since_ptr + step_at + r)
            if pairs_ptr is not None:
                scores = tl.load(pairs_at + r[:, None] * 64 + r[None, :]).to(tl.float32)
                pairs_at += H // GROUP * 4096
            else:
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            decay = tl.exp2(tl.where(r[:, None] >= r[None, :], since[:, None] - since[None, :], -1000.0))
            scores *= decay
            if HAS_STEPS:
                scores *= tl.load(dt_ptr + step_at + r)[None, :]
            o = tl.dot(q, s.to(dtype), input_precision=PRECISION) * tl.exp2(since)[:, None]
            o = tl.dot(scores.to(dtype), v, o, input_precision=PRECISION)
            if HAS_SCALE:
                o *= scale
            if HAS_SKIP:
                o += v.to(tl.float32) * skip
            tl.store(
                out_at + r[:, None] * (H * V) + cols[None, :], o.to(out_ptr.dtype.element_ty), mask=of_values
            )
        until = tl.load(until_ptr + step_at + r)
        s *= tl.exp2(total)
        s = tl.dot(tl.trans(k), (v.to(tl.float32) * until[:, None]).to(dtype), s, input_precision=PRECISION)
        whole += total
        q_at += 64 * q_t
        k_at += 64 * k_t
        v_at += 64 * v_t
        out_at += 64 * H * V
        step_at += 64 * H
    if PART == 0:
        tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside & (slot > 0))
    elif PART == 1:
        tl.store(segment_at, s, mask=inside)
        tl.store(decay_ptr + piece * H + h, whole)


@triton.jit(do_not_specialize=["SEGMENT"])
def _join_kernel(
    state_ptr, cu_ptr, slots_ptr, fresh_ptr, segment_ptr, decay_ptr, SEGMENT, H, K, V, s_s, s_h, s_k, s_v,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The state that a segment adds becomes the state at its beginning; the last one is the sequence's.
    follow(OVERLAP)
    i = tl.program_id(0)
    h = tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K * V
    start = tl.load(cu_ptr + i)
    end = tl.load(cu_ptr + i + 1)
    slot, known = slot_at(i, slots_ptr, fresh_ptr)
    state_at = state_ptr + slot * s_s + h * s_h + at // V * s_k + at % V * s_v
    s = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)
    piece = (start // SEGMENT + i).to(tl.int64)
    for _ in range(start, end, SEGMENT):
        added = tl.load(segment_ptr + (piece * H + h) * K * V + at, mask=inside, other=0.0)
        decay = tl.exp2(tl.load(decay_ptr + piece * H + h))
        tl.store(segment_ptr + (piece * H + h) * K * V + at, s, mask=inside)
        s = s * decay + added
        piece += 1
    tl.store(state_at, s.to(state_ptr.dtype.element_ty), mask=inside & (slot > 0))


def supports(p: Problem) -> bool:
    """Whether the kernel takes it. Each part of the values computes the pairs again: there may be two at most."""
    return p.rule in (LINEAR, STEP) and p.gate != BY_CHANNEL and not p.normalize and cdiv(p.sizes[4], 64) <= 2


def shares(p: Problem) -> bool:
    """Whether products of queries and keys are computed once for the heads that share them."""
    return p.sizes[2] >= SHARING


def segment_of(p: Problem) -> int:
    """Tokens of a segment; 0 if sequences stay whole. Shapes alone decide."""
    batch, heads, _, _, values = p.sizes
    programs, room = heads * cdiv(values, 64), RESIDENT * multiprocessors(p.v.device)
    tokens = p.v.shape[0]
    pieces = min(room // programs, tokens // SHORTEST)
    return 64 * cdiv(tokens, 64 * pieces) if pieces >= 2 * batch else 0


def tile_of(p: Problem) -> dict[str, int]:
    """Stages and warps: of 128 keys and 64 values two programs fit into a multiprocessor's shared memory."""
    exact = p.v.itemsize == 4
    return {"num_stages": 1 if exact else 2, "num_warps": 8 if exact or p.sizes[3] > 128 else 4}


def run(p: Problem, out: torch.Tensor, segment: int | None = None) -> None:
    """Fill `out` [T, H, V], contiguous, and the states. segment: its tokens, a multiple of 64, or 0: no cut."""
    batch, heads, group, keys, values = p.sizes
    tokens, steps = p.v.shape[0], batch.bit_length()
    segment = segment_of(p) if segment is None else segment
    block_k, block_v = max(16, next_power_of_2(keys)), min(64, max(16, next_power_of_2(values)))
    pieces = tokens // segment + batch if segment else batch
    states = decays = None
    if segment:
        states = torch.empty(pieces, heads, keys, values, dtype=torch.float32, device=p.v.device)
        decays = torch.empty(pieces, heads, dtype=torch.float32, device=p.v.device)
    chunks = tokens // 64 + batch
    since, dt, until = torch.empty(3, chunks, heads, 64, dtype=torch.float32, device=p.v.device)
    groups = heads // group
    half, pairs = p.v.dtype == torch.float16, None
    if shares(p):
        dtype = torch.float32 if half else p.v.dtype
        pairs = torch.empty(chunks, groups, 64, 64, dtype=dtype, device=p.v.device)
    precision = "tf32x3" if p.v.dtype == torch.float32 else "tf32"
    launch_kernel(
        _decays_kernel, (chunks, cdiv(heads, 16) + (0 if pairs is None else groups)),
        p.g, p.rate, p.bias, p.cu_seqlens, since, dt, until, p.q, p.k, pairs, batch, steps, heads, groups, keys,
        p.low, p.high, *strides(p.g, 2), *strides(p.q, 2), *strides(p.k, 2),
        RULE=p.rule, GATE=p.gate, HAS_BIAS=p.bias is not None, BLOCK=16, BLOCK_K=block_k, HALF=half,
        PRECISION=precision, num_warps=4,
    )  # fmt: skip
    shared: dict[str, Any] = {
        "HAS_STEPS": p.rule == STEP, "HAS_SKIP": p.skip is not None, "HAS_SCALE": p.scale != 1.0,
        "EVEN": keys == block_k and values % block_v == 0, "BLOCK_K": block_k, "BLOCK_V": block_v,
        "PRECISION": precision, **tile_of(p),
    }  # fmt: skip

    def scan(part: int) -> None:
        launch_kernel(
            linear_kernel, (pieces * heads * cdiv(values, block_v),),
            p.v, p.q, p.k, pairs, since, dt, until, p.skip, p.state, p.cu_seqlens, p.slots, p.fresh,
            out, states, decays, batch, steps, segment, heads, group, keys, values, p.scale,
            *strides(p.q, 2), *strides(p.k, 2), *strides(p.v, 2), *p.state.stride(), PART=part, **shared,
        )  # fmt: skip

    if not segment:
        scan(WHOLE)
        return
    scan(STATES)
    launch_kernel(
        _join_kernel, (batch, heads, cdiv(keys * values, 1024)),
        p.state, p.cu_seqlens, p.slots, p.fresh, states, decays, segment, heads, keys, values, *p.state.stride(),
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    scan(OUTPUTS)
