"""Triton kernels of `sampling`: the smallest kept logit, then an exponential race over the vocabulary.

The threshold is exact and needs no sort. A first pass keeps the largest logit of each of 4096 lanes (token id modulo
4096). The k-th largest lane is a lower bound of the k-th largest logit, and a tight one. The few tokens above the bound
are copied to a scratch row, where bisection over the bits of floats finds the threshold. For top_p alone, the mass of
the lanes gives the bound. If too many tokens are above the bound, bisection runs over the whole row. Masses are integer
sums, so the order of summation does not affect a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastkernels.overrides.kit.philox import exponential_block

LANES = 4096
RACE = 1024  # tokens per iteration of the race
_GREEDY = tl.constexpr(1e-5)
# 2^40, the integer mass of the most likely token; a sum of 2^22 of them fits 63 bits.
_UNIT = tl.constexpr(1099511627776.0)


@triton.jit
def _load(ptr, cols, mask):
    """float32 logits: NaN as -inf, +inf as the largest number."""
    x = tl.load(ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), 3.4028234663852886e38)


@triton.jit
def _key(x):
    """Map floats to integers of the same order; _value is the inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(x, ptr, V, value, ROW: tl.constexpr, LANES: tl.constexpr):
    """Count the logits that are at least `value`, in the vector x or, with ROW, in the row that begins with x."""
    hits = (x >= value).to(tl.int32)
    if ROW:
        for start in tl.range(LANES, V, LANES, loop_unroll_factor=4):
            cols = start + tl.arange(0, LANES)
            hits += (_load(ptr, cols, cols < V) >= value).to(tl.int32)
    return tl.sum(hits, axis=0)


@triton.jit
def _mass_from(x, ptr, V, value, top, t, ROW: tl.constexpr, LANES: tl.constexpr):
    """Sum the mass of logits that are at least `value`, in the vector x or, with ROW, in the row that begins with x."""
    mass = tl.where(x >= value, (tl.exp((x - top) / t) * _UNIT).to(tl.int64), 0)
    if ROW:
        for start in tl.range(LANES, V, LANES, loop_unroll_factor=4):
            cols = start + tl.arange(0, LANES)
            more = _load(ptr, cols, cols < V)
            mass += tl.where(more >= value, (tl.exp((more - top) / t) * _UNIT).to(tl.int64), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def _kth(x, ptr, V, k, low, top, ROW: tl.constexpr, LANES: tl.constexpr):
    """The k-th largest logit, or `low` if fewer than k logits are larger; `top` is the largest logit."""
    yes, no = _key(low), _key(top) + 1
    while no - yes > 1:
        middle = (yes + no) >> 1
        if _count_from(x, ptr, V, _value(middle), ROW, LANES) >= k:
            yes = middle
        else:
            no = middle
    return _value(yes)


@triton.jit
def _nucleus(x, ptr, V, wanted, low, top, t, ROW: tl.constexpr, LANES: tl.constexpr):
    """The smallest value that is at least `low` and has less than the mass `wanted` above it."""
    no, yes = _key(low) - 1, _key(top)
    while yes - no > 1:
        middle = (yes + no) >> 1
        if _mass_from(x, ptr, V, _value(middle + 1), top, t, ROW, LANES) < wanted:
            yes = middle
        else:
            no = middle
    return _value(yes)


@triton.jit
def _share(mass, p):
    """The smallest integer that is not below p * mass."""
    return tl.ceil(mass.to(tl.float64) * p.to(tl.float64)).to(tl.int64)


@triton.jit
def _exact(x, ptr, V, k, p, by_k, by_p, wanted, kept, low, top, t, ROW: tl.constexpr, LANES: tl.constexpr):
    """The smallest kept logit, found among the logits that are at least `low`."""
    if by_k:
        kept = tl.maximum(kept, _kth(x, ptr, V, k, low, top, ROW, LANES))
    if by_p:
        if by_k:
            wanted = _share(_mass_from(x, ptr, V, kept, top, t, ROW, LANES), p)
        kept = _nucleus(x, ptr, V, wanted, tl.maximum(kept, low), top, t, ROW, LANES)
    return kept


@triton.jit
def threshold_kernel(
    x_ptr, t_ptr, k_ptr, p_ptr, min_p_ptr, spill_ptr, count_ptr, out_ptr, stride, V, LANES: tl.constexpr,
):  # fmt: skip
    # One program per row. out: [B], the smallest kept logit, -inf for rows that keep all.
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(t_ptr + row).to(tl.float32)
    k = tl.load(k_ptr + row).to(tl.int32)
    p = tl.load(p_ptr + row).to(tl.float32)
    min_p = tl.load(min_p_ptr + row).to(tl.float32)
    by_k, by_p = (k > 0) & (k < V), p < 1.0
    kept = tl.full([], float("-inf"), tl.float32)
    if (t >= _GREEDY) & (by_k | by_p | (min_p > 0.0)):
        ptr = x_ptr + row * stride
        lane = tl.arange(0, LANES)
        first = _load(ptr, lane, lane < V)
        best = first
        for start in tl.range(LANES, V, LANES, loop_unroll_factor=4):
            best = tl.maximum(best, _load(ptr, start + lane, start + lane < V))
        top = tl.max(best, axis=0)
        if top > float("-inf"):
            if min_p > 0.0:
                kept = top + t * tl.log(min_p)
            low = kept
            wanted = tl.full([], 0, tl.int64)
            if by_k & (k <= LANES):
                low = tl.maximum(low, _kth(best, ptr, V, k, low, top, False, LANES))
            if by_p & (by_k == 0):
                wanted = _share(_mass_from(first, ptr, V, kept, top, t, True, LANES), p)
                if _mass_from(best, ptr, V, kept, top, t, False, LANES) >= wanted:
                    low = tl.maximum(low, _nucleus(best, ptr, V, wanted, low, top, t, False, LANES))
            if by_k | by_p:
                # Copy the candidates in any order: counts and integer masses do not depend on it.
                tl.atomic_xchg(count_ptr + row, 0)
                tl.debug_barrier()
                if low > float("-inf"):
                    for start in tl.range(0, V, LANES, loop_unroll_factor=4):
                        x = _load(ptr, start + lane, start + lane < V)
                        hit = x >= low
                        at = tl.atomic_add(count_ptr + row + lane * 0, 1, mask=hit)
                        tl.store(spill_ptr + row * LANES + at, x, mask=hit & (at < LANES))
                tl.debug_barrier()
                n = tl.atomic_add(count_ptr + row, 0)
                if (low > float("-inf")) & (n <= LANES):
                    few = tl.load(spill_ptr + row * LANES + lane, mask=lane < n, other=float("-inf"))
                    kept = _exact(few, ptr, V, k, p, by_k, by_p, wanted, kept, low, top, t, False, LANES)
                else:
                    kept = _exact(first, ptr, V, k, p, by_k, by_p, wanted, kept, low, top, t, True, LANES)
    tl.store(out_ptr + row, kept)


@triton.jit
def race_kernel(
    x_ptr, t_ptr, seed_ptr, offset_ptr, low_ptr, score_ptr, id_ptr, stride, V, SPAN, RACE: tl.constexpr,
):  # fmt: skip
    # Program (row, part): the best of SPAN tokens. score, id: [B, parts]. The lowest id wins among equal scores.
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    t = tl.load(t_ptr + row).to(tl.float32)
    low = tl.load(low_ptr + row)
    ptr = x_ptr + row * stride
    lane = tl.arange(0, RACE)
    begin = part * SPAN
    end = tl.minimum(begin + SPAN, V)  # SPAN is a multiple of RACE
    best = tl.full([RACE], float("-inf"), tl.float32)
    ids = begin + lane
    if t < _GREEDY:
        for start in range(begin, end, RACE):
            x = _load(ptr, start + lane, start + lane < V)
            ids = tl.where(x > best, start + lane, ids)
            best = tl.maximum(best, x)
    else:
        seed, offset = tl.load(seed_ptr + row), tl.load(offset_ptr + row)
        for start in range(begin, end, RACE):
            x = _load(ptr, start + lane, start + lane < V)
            if tl.max(x, axis=0) >= low:  # few blocks have a kept token: skip the noise of the others
                noise = exponential_block(seed, offset, start, RACE // 4)
                score = tl.where(x >= low, tl.div_rn(x, t) - tl.log(noise), float("-inf"))
                ids = tl.where(score > best, start + lane, ids)
                best = tl.maximum(best, score)
    most = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == most, ids, V), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(score_ptr + at, most)
    tl.store(id_ptr + at, winner.to(id_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["parts"])
def pick_kernel(score_ptr, id_ptr, out_ptr, parts, PARTS: tl.constexpr):
    # One program per row: the best of its parts.
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    score = tl.load(score_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    ids = tl.load(id_ptr + row * parts + part, mask=part < parts, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score, axis=0), ids, 2147483647), axis=0)
    tl.store(out_ptr + row, winner.to(tl.int64))
