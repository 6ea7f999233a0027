"""attention_decode in one launch: programs split the keys; the last program of a sequence to arrive adds its parts.

Shapes bound the number of parts, and lengths on the device decide it: the host plans nothing, and one CUDA graph serves
all lengths. Lengths are read only after the wait of an early launch, since the previous kernel may write them. Parts
are added in a fixed order: equal calls have equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.attention.paged_cache import check, memory
from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import multiprocessors, next_power_of_2, tickets
from fastkernels.overrides.kit.overlap import follow, overlap

MAX_SPLITS = 128
MAX_HEAD_SIZE, MAX_GROUP = 512, 64  # group: query heads per key head
SHARED = 216 * 1024  # bytes of shared memory for the tiles of a program
REGISTERS = 1 << 16  # of an SM
COMBINED = 2048  # float32 values of parts that a warp adds at once; at most four warps count
EACH, EVEN = 0, 1  # values of `even`
LOG2E = 1.4426950408889634


def _set(
    per_sm: int, block_n: int, num_warps: int, num_stages: int, min_split: int = 64, even: int = 0
) -> dict[str, int]:
    return {
        "per_sm": per_sm, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages,
        "min_split": min_split, "even": even,
    }  # fmt: skip


# Parameter sets; any set is correct for any shape.
#   per_sm     programs per SM, which bounds the parts of a sequence
#   block_n    keys in a tile
#   min_split  keys of the smallest part: a smaller one costs more to add than it saves
#   even       how keys are divided. 0: each sequence over as many programs; 1: the whole batch, so that all programs
#              have equally many
PARAMS: tuple[dict[str, int], ...] = (
    _set(2, 64, 4, 4, 128), _set(3, 64, 4, 3, 256), _set(4, 32, 2, 4), _set(1, 64, 4, 7), _set(6, 32, 2, 3),
    _set(4, 32, 2, 4, 64, EVEN), _set(1, 32, 4, 4), _set(2, 32, 4, 2), _set(1, 32, 4, 4, 64, EVEN),
)  # fmt: skip
WIDE = PARAMS[-3:]  # for head sizes over 256, which take all registers of four warps


def has_room(params: dict[str, int], head_size: int, itemsize: int) -> bool:
    """Return whether a set is for this head size, and its tiles of so many bytes per channel fit an SM's memory."""
    width = max(next_power_of_2(head_size), 16) * itemsize
    if (params in WIDE) != (head_size > 256):
        return False
    return 2 * params["block_n"] * width * (params["num_stages"] - 1) <= SHARED


def fits(params: dict[str, int], q: torch.Tensor, key_cache: torch.Tensor, *_: Any) -> bool:
    """Return whether this set suits a call: its tiles fit."""
    return has_room(params, q.shape[2], key_cache.element_size())


@lru_cache(maxsize=64)
def choose(head_size: int, itemsize: int) -> dict[str, int]:
    """Return the default parameters: the first set whose tiles fit."""
    return next(p for p in PARAMS if has_room(p, head_size, itemsize))


def splits_of(programs: int, max_seqlen_k: int, per_sm: int, min_split: int, sms: int) -> int:
    """Return the most parts of a sequence: `per_sm` programs per SM, and no part smaller than min_split."""
    return max(min(per_sm * sms // programs, -(-max_seqlen_k // min_split), MAX_SPLITS), 1)


@triton.jit
def add_parts(
    out_ptr, part_ptr, lse_ptr, first, bump, step, parts, group, D,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Adds the parts of one sequence and key head by their shares of the softmax: rows first + bump, first + step, ...
    heads, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, parts, BLOCK_P):  # not pipelined: shared memory takes 1.5 us longer
        part = begin + tl.arange(0, BLOCK_P)
        there = (part < parts)[:, None] & (heads < group)[None, :]
        row = first + part * step + tl.where(part == 0, bump, 0)
        at = row[:, None] * group + heads[None, :]
        # Other SMs write parts while this kernel runs: bypass L1.
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
        if UPCAST:  # in the interpreter
            scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32))) * scale
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype))) * scale
        if SOFTCAP:  # scale and softcap contain log2 e
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
    # Attends to the keys low .. high - 1 of a sequence with n_k keys, for the query heads of a key head. A single part
    # writes the result. Otherwise it goes to `row`, and the last to arrive adds rows first + bump, first + step, ...
    # ticket: the counter of this sequence and key head. SPLIT: whether there may be several parts.
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
        tl.debug_barrier()  # one thread takes the ticket, after all threads have stored
        if tl.atomic_add(ticket_ptr + ticket, 1, sem="acq_rel", scope="gpu") == parts - 1:
            add_parts(
                out_at, part_ptr, lse_ptr, first, bump, step, parts, group, D, BLOCK_P, BLOCK_G, BLOCK_D
            )
            tl.store(ticket_ptr + ticket, 0)  # for the next launch
    else:
        tl.store(out_at + rows[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits", "table_stride", "min_split", "window_left"])
def _decode_split_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, ticket_ptr, len_ptr, table_ptr, q_stride_b, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
    group, D, scale, v_scale, window_left, softcap, splits, min_split,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    SAME: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (key head, split, sequence): all query heads of the group share the keys that it reads. Programs
    # of one sequence's heads are neighbours, like the memory that they read.
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_k = tl.load(len_ptr + seq)
    first = 0
    if WINDOW:
        first = tl.maximum(n_k - 1 - window_left, 0) // BLOCK_N * BLOCK_N
    # At most `splits` parts, fewer where they would be under min_split; none is empty.
    tiles = tl.cdiv(n_k - first, BLOCK_N)
    parts = tl.minimum(tl.cdiv(n_k - first, min_split), splits)
    per_part = tl.cdiv(tiles, tl.maximum(parts, 1))
    parts = tl.maximum(tl.cdiv(tiles, tl.maximum(per_part, 1)), 1)
    if split >= parts:
        return
    low = first + split * per_part * BLOCK_N
    high = tl.minimum(low + per_part * BLOCK_N, n_k)
    ticket = seq * tl.num_programs(0) + kv_head
    one_part(
        q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, ticket_ptr, table_ptr, q_stride_b, q_stride_h,
        k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
        group, D, scale, v_scale, window_left, softcap, tl.num_programs(0), kv_head, seq, low, high, n_k, parts,
        ticket * splits + split, ticket * splits, 0, 1, ticket, PAGE, WINDOW, SOFTCAP, SPLIT, UPCAST, SAME, EVEN_D,
        BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_P, STAGES,
    )  # fmt: skip


@triton.jit
def _tiles_of(len_ptr, seqs, batch, window_left, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    # Tiles of each sequence: one for a sequence without keys, which writes zeros; 0 past the batch.
    keys = tl.load(len_ptr + seqs, mask=seqs < batch, other=0)
    if WINDOW:
        keys -= tl.maximum(keys - 1 - window_left, 0) // BLOCK_N * BLOCK_N
    return tl.where(seqs < batch, tl.maximum(tl.cdiv(keys, BLOCK_N), 1), 0)


@triton.jit(do_not_specialize=["batch", "table_stride", "min_tiles", "window_left"])
def _decode_even_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, ticket_ptr, len_ptr, table_ptr, q_stride_b, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
    group, D, scale, v_scale, window_left, softcap, batch, min_tiles,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    SAME: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (key head, worker). Workers divide the concatenated tiles of all sequences evenly: one has the end
    # of a sequence, some whole ones, and the beginning of another.
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    seqs = tl.arange(0, BLOCK_B)
    tiles = _tiles_of(len_ptr, seqs, batch, window_left, WINDOW, BLOCK_N)
    ends = tl.cumsum(tiles, 0)
    every = tl.sum(tiles, 0).to(tl.int64)
    workers = tl.minimum(tl.maximum(every // min_tiles, 1), tl.num_programs(1))
    if worker >= workers:
        return
    begin, last = (worker * every // workers).to(tl.int32), ((worker + 1) * every // workers).to(tl.int32)
    ours = kv_head * tl.num_programs(1).to(tl.int64)
    at = begin
    while at < last:
        index = tl.sum((ends <= at).to(tl.int32), 0)
        seq_end = tl.sum(tl.where(seqs == index, ends, 0), 0)
        seq_begin = seq_end - tl.sum(tl.where(seqs == index, tiles, 0), 0)
        seq = index.to(tl.int64)
        n_k = tl.load(len_ptr + seq)
        low = (at - seq_begin) * BLOCK_N
        if WINDOW:
            low += tl.maximum(n_k - 1 - window_left, 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(seq_end, last)
        high = tl.minimum(low + (stop - at) * BLOCK_N, n_k)
        # A worker has two rows for parts: for its first sequence, and for another that is its last.
        first = ((seq_begin + 1) * workers - 1) // every
        parts = ((seq_end * workers - 1) // every - first + 1).to(tl.int32)
        bump = (seq_begin > first * every // workers).to(tl.int64)
        one_part(
            q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, lse_ptr, ticket_ptr, table_ptr, q_stride_b, q_stride_h,
            k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, table_stride,
            group, D, scale, v_scale, window_left, softcap, tl.num_programs(0), kv_head, seq, low, high, n_k, parts,
            2 * (ours + worker) + (at > begin).to(tl.int64), 2 * (ours + first), bump, 2,
            ours + first,  # no other sequence continues from that worker to the next
            PAGE, WINDOW, SOFTCAP, SPLIT, UPCAST, SAME, EVEN_D, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_P, STAGES,
        )  # fmt: skip
        at = stop


def supports_split(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *_: Any,
) -> str | None:
    """Return why the kernel does not support this call, None if it does."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"the caches are {key_cache.dtype} and {value_cache.dtype}, q is {q.dtype}"
    if key_cache.dtype == torch.float8_e4m3fn and (reason := fp8_refusal(q.device)) is not None:
        return reason
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"head size {q.shape[-1]} is over {MAX_HEAD_SIZE}"
    if (group := q.shape[1] // key_cache.shape[2]) > MAX_GROUP:
        return f"{group} query heads on one key head are over {MAX_GROUP}"
    for name, t in (
        ("q", q),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_table", block_table),
    ):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def decode_split(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_k: int,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: None = None,
    alibi_slopes: None = None,
    out: torch.Tensor | None = None,
    **params: int,
) -> torch.Tensor:
    """Run the kernel with the arguments of attention_decode.reference.

    params  one of PARAMS, or some of its keys
    out     contiguous memory for the result, other than q's
    """
    check("attention_decode", q, key_cache, value_cache)
    batch, _, d = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    out = memory("attention_decode", q, out)
    if out.numel() == 0:
        return out
    p = {**choose(d, key_cache.element_size()), **params}
    group, block_d = q.shape[1] // kv_heads, max(next_power_of_2(d), 16)
    sms = multiprocessors(q.device)
    splits = splits_of(batch * kv_heads, max_seqlen_k, p["per_sm"], p["min_split"], sms)
    workers = max(p["per_sm"] * sms // kv_heads, 1)
    parts, counters = batch * splits if splits > 1 else 0, batch
    if p["even"] == EVEN:
        parts, counters = 2 * workers, workers
    part = lse = taken = None
    if parts:
        part = torch.empty((kv_heads * parts, group, d), dtype=torch.float32, device=q.device)
        lse = torch.empty((kv_heads * parts, group), dtype=torch.float32, device=q.device)
        taken = tickets.get(q.device, kv_heads * counters)
    block_g = next_power_of_2(group)
    arguments = (
        q, key_cache, value_cache, out, part, lse, taken, seq_lens, block_table, *q.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0), group, d, scale * k_scale * LOG2E,
        v_scale, window_left, softcap * LOG2E,
    )  # fmt: skip
    options: dict[str, Any] = {
        "PAGE": block_size, "WINDOW": window_left >= 0, "SOFTCAP": softcap > 0, "UPCAST": q.device.type == "cpu",
        "SAME": key_cache.stride()[:2] == value_cache.stride()[:2], "EVEN_D": d == block_d, "SPLIT": parts > 0,
        "BLOCK_G": block_g, "BLOCK_M": max(block_g, 16), "BLOCK_N": p["block_n"],
        "BLOCK_D": block_d, "BLOCK_P": max(min(p["num_warps"], 4) * COMBINED // (block_g * block_d), 1),
        "STAGES": p["num_stages"], "num_warps": p["num_warps"], "num_stages": p["num_stages"],
        # Adding parts would take more registers than per_sm programs have, without need.
        "maxnreg": min(REGISTERS // (32 * p["num_warps"] * p["per_sm"]) // 8 * 8, 248),
    }  # fmt: skip
    if p["even"] == EACH:
        _decode_split_kernel[(kv_heads, splits, batch)](
            *arguments, splits, p["min_split"], **options, **overlap(q.device)
        )
        return out
    least = max(p["min_split"] // p["block_n"], 1)
    block_b = 32 if batch <= 32 else max(next_power_of_2(batch), 256)
    _decode_even_kernel[(kv_heads, workers)](
        *arguments, batch, least, BLOCK_B=block_b, **options, **overlap(q.device)
    )
    return out
