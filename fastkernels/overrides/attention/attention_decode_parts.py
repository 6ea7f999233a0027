"""What programs of attention_decode do: attend to some keys of a sequence, and add its parts if they come last.

Parts are added in a fixed order, whoever comes last: equal calls have equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_parts(
    out_ptr, part_ptr, lse_ptr, first, bump, step, parts, group, D,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The parts of one sequence and key head, by their shares of the softmax: rows first + bump, first + step, ...
    heads, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, parts, BLOCK_P):  # not pipelined: through shared memory it takes 1.5 us longer
        part = begin + tl.arange(0, BLOCK_P)
        there = (part < parts)[:, None] & (heads < group)[None, :]
        row = first + part * step + tl.where(part == 0, bump, 0)
        at = row[:, None] * group + heads[None, :]
        # Other multiprocessors wrote them while this kernel runs: they are not read from L1.
        lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            part_ptr + at[:, :, None] * D + dims[None, None, :], mask=there[:, :, None] & (dims < D)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share, decay = tl.exp2(lse - base[None, :]), tl.exp2(top - base)
        total = total * decay + tl.sum(share, 0)
        acc = acc * decay[:, None] + tl.sum(values * share[:, :, None], 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = (heads < group)[:, None] & (dims < D)[None, :]
    tl.store(out_ptr + heads[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend(
    q, k_at, v_at, table_at, low, high, n_k, D, scale, v_scale, window_left, softcap, k_stride_b, k_stride_s,
    v_stride_b, v_stride_s, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    SAME: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Attention of q [BLOCK_M, BLOCK_D] to the keys low .. high - 1, and the log2 of the sum of the weights.
    # SAME: both caches have the same strides.
    dims, offs = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # A tile's blocks are looked up one tile ahead, so that no read of keys waits for the table.
    page = tl.load(table_at + (low + offs) // PAGE, mask=low + offs < high, other=0)
    for begin in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        cols = begin + offs
        inside = cols < high
        mask = inside[:, None] if EVEN_D else inside[:, None] & (dims < D)[None, :]
        block, slot = page.to(tl.int64), cols % PAGE
        k_off = block * k_stride_b + slot * k_stride_s
        v_off = k_off if SAME else block * v_stride_b + slot * v_stride_s
        k = tl.load(k_at + k_off[:, None], mask=mask, other=0.0)
        v = tl.load(v_at + v_off[:, None], mask=mask, other=0.0)
        page = tl.load(table_at + (cols + BLOCK_N) // PAGE, mask=cols + BLOCK_N < high, other=0)
        if UPCAST:  # the interpreter
            scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32))) * scale
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype))) * scale
        if SOFTCAP:  # scale has log2 e in it, and so has softcap
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / softcap))))
        seen = inside
        if WINDOW:
            seen = seen & (cols >= n_k - 1 - window_left)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if UPCAST:
            acc += tl.dot(p.to(q.dtype).to(tl.float32), v.to(tl.float32))
        else:
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc)
        top = new_top
    weight = tl.where(total == 0.0, 1.0, total)
    return acc * v_scale / weight[:, None], tl.where(total == 0.0, float("-inf"), top + tl.log2(weight))


@triton.jit
def one_part(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, ticket_ptr, table_ptr, q_stride_b, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
    group, D, scale, v_scale, window_left, softcap, kv_heads, kv_head, seq, low, high, n_k,
    parts, row, first, bump, step, ticket,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    SAME: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The keys low .. high - 1 of a sequence's n_k and its query heads of one key head. The only one of `parts` writes
    # the result; else this one goes to `row`, and the last to come adds rows first + bump, first + step, ...
    # ticket: which counts those of this sequence and key head. SPLIT: whether there may be several parts.
    dims, rows = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    q_mask = (rows < group)[:, None] & (dims < D)[None, :]
    q_at = q_ptr + seq * q_stride_b + (kv_head * group + rows)[:, None] * q_stride_h + dims[None, :]
    acc, lse = attend(
        tl.load(q_at, mask=q_mask, other=0.0), k_ptr + kv_head.to(tl.int64) * k_stride_h + dims[None, :],
        v_ptr + kv_head.to(tl.int64) * v_stride_h + dims[None, :], table_ptr + seq * table_stride, low, high, n_k, D,
        scale, v_scale, window_left, softcap, k_stride_b, k_stride_s, v_stride_b, v_stride_s, PAGE, WINDOW, SOFTCAP,
        UPCAST, SAME, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    out_at = out_ptr + (seq * kv_heads + kv_head) * group * D
    if SPLIT and parts > 1:
        at = row * group + rows
        tl.store(lse_ptr + at, lse, mask=rows < group)
        tl.store(part_ptr + at[:, None] * D + dims[None, :], acc, mask=q_mask)
        tl.debug_barrier()  # one thread takes the ticket, for what all have stored
        if tl.atomic_add(ticket_ptr + ticket, 1, sem="acq_rel", scope="gpu") == parts - 1:
            add_parts(
                out_at, part_ptr, lse_ptr, first, bump, step, parts, group, D, BLOCK_P, BLOCK_G, BLOCK_D
            )
            tl.store(ticket_ptr + ticket, 0)  # as it was found, for the next launch
    else:
        tl.store(out_at + rows[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
