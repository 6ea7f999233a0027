"""Triton kernel of multi-head latent attention: all heads read one latent vector per token, as key and as value."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.fp8 import fp8_refusal
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2, shared_memory
from fastkernels.overrides.kit.overlap import follow, overlap

MIN_SPLIT = 256  # keys: a smaller split costs more to combine than it saves
MAX_SIZE = 1024  # channels of a latent, padded to a power of two
WIDE_TILE = 150_000  # bytes of shared memory of 64 rows and two stages of 32 keys, in 16 bits


@triton.jit(do_not_specialize=["table_stride", "batch"])
def _mla_kernel(
    q_ptr, kv_ptr, out_ptr, part_ptr, lse_ptr, cu_ptr, len_ptr, table_ptr, q_stride_t, q_stride_h,
    kv_stride_b, kv_stride_s, out_stride_t, out_stride_h, table_stride, block_size, batch, heads, R, P, scale, k_scale,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (block of rows, sequence, split). A row is one head of one query, heads first: rows of a block
    # share the keys that it reads, whatever the number of heads.
    seq, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, n_q, first = seq, 1, tl.program_id(0) * BLOCK_M
    if RAGGED:
        # The grid depends on shapes only, so that a CUDA graph serves any lengths: blocks of sequence i begin at number
        # i + (rows before it) // BLOCK_M. Late queries see the most keys: they go first.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        before = tl.load(cu_ptr)
        found, most = batch * 0, batch - 1
        while found < most:
            middle = (found + most + 1) // 2
            is_past = (tl.load(cu_ptr + middle) - before) * heads // BLOCK_M + middle > block
            found, most = tl.where(is_past, found, middle), tl.where(is_past, middle - 1, most)
        queries = tl.load(cu_ptr + found)
        n_q = tl.load(cu_ptr + found + 1) - queries
        first = (block - found - (queries - before) * heads // BLOCK_M) * BLOCK_M
        seq, start = found.to(tl.int64), queries.to(tl.int64)
    n_rows = n_q * heads
    if first < n_rows:
        n_k = tl.load(len_ptr + seq)
        rows = first + tl.arange(0, BLOCK_M)
        token, head = (start + rows // heads)[:, None], (rows % heads)[:, None]
        last = n_k - n_q + rows // heads
        channel, rope = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
        row_mask = (rows < n_rows)[:, None]
        q_at = q_ptr + token * q_stride_t + head * q_stride_h
        q = tl.load(q_at + channel[None, :], mask=row_mask & (channel < R)[None, :], other=0.0)
        q_rope = tl.load(q_at + R + rope[None, :], mask=row_mask & (rope < P)[None, :], other=0.0)
        high = tl.minimum(n_k - n_q + (tl.minimum(first + BLOCK_M, n_rows) - 1) // heads + 1, n_k)
        # SPLITS is for the longest sequence; a shorter one uses fewer, none of them under MIN_SPLIT.
        low = 0
        if SPLITS > 1:
            per_split = tl.maximum(tl.cdiv(tl.cdiv(high, BLOCK_N), SPLITS) * BLOCK_N, MIN_SPLIT)
            low = split * per_split
            high = tl.minimum(low + per_split, high)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for begin in range(low, high, BLOCK_N):
            cols = begin + tl.arange(0, BLOCK_N)
            inside = cols < high
            page = tl.load(table_ptr + seq * table_stride + cols // block_size, mask=inside, other=0).to(
                tl.int64
            )
            at = (page * kv_stride_b + (cols % block_size).to(tl.int64) * kv_stride_s)[:, None]
            c_mask = inside[:, None] & (channel < R)[None, :]
            c = tl.load(kv_ptr + at + channel[None, :], mask=c_mask, other=0.0).to(q.dtype)
            p_mask = inside[:, None] & (rope < P)[None, :]
            k_rope = tl.load(kv_ptr + at + R + rope[None, :], mask=p_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(c), input_precision=PRECISION)
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
            scores = tl.where(
                (cols[None, :] <= last[:, None]) & inside[None, :], scores * scale, float("-inf")
            )
            new_top = tl.maximum(top, tl.max(scores, 1))
            # Before the first key, -inf - -inf would be NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp(scores - base[:, None])
            decay = tl.exp(top - base)
            total = total * decay + tl.sum(p, 1)
            acc = acc * decay[:, None] + tl.dot(p.to(c.dtype), c, input_precision=PRECISION)
            top = new_top
        acc = acc * k_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        mask = row_mask & (channel < R)[None, :]
        if SPLITS == 1:
            out_at = out_ptr + token * out_stride_t + head * out_stride_h + channel[None, :]
            tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            row = (token * heads + head) * SPLITS + split
            lse = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
            tl.store(lse_ptr + row, lse[:, None], mask=row_mask)
            tl.store(part_ptr + row * R + channel[None, :], acc, mask=mask & (low < high))


@triton.jit
def _combine_kernel(
    part_ptr, lse_ptr, out_ptr, R, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per (sequence, head): it weights the splits' results by their shares of the softmax.
    row = tl.program_id(0).to(tl.int64)
    splits, channel = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_R)
    lse = tl.load(lse_ptr + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse - base), 0)
    acc = tl.zeros([BLOCK_R], tl.float32)
    for split in range(SPLITS):
        one = tl.load(lse_ptr + row * SPLITS + split)
        used = (channel < R) & (one > float("-inf"))  # splits without keys wrote only their lse
        part = tl.load(part_ptr + (row * SPLITS + split) * R + channel, mask=used, other=0.0)
        acc += tl.exp(one - base) * part
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * R + channel, out.to(out_ptr.dtype.element_ty), mask=channel < R)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def splits_for(device: torch.device, programs: int, max_seqlen_k: int) -> int:
    """Return the most splits: one program per SM, none under MIN_SPLIT, a power of two."""
    wanted = min(-(-_multiprocessors(device) // programs), -(-max_seqlen_k // MIN_SPLIT), 64)
    return 1 << (max(wanted, 1).bit_length() - 1)


def supports(q: torch.Tensor, kv_cache: torch.Tensor, *_: Any) -> str | None:
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if kv_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"the cache is {kv_cache.dtype}, q is {q.dtype}"
    if kv_cache.dtype == torch.float8_e4m3fn and (reason := fp8_refusal(q.device)) is not None:
        return reason
    if q.shape[-1] > MAX_SIZE:
        return f"{q.shape[-1]} channels are over {MAX_SIZE}"
    for name, t in (("q", q), ("kv_cache", kv_cache)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def attend(
    q: torch.Tensor, kv_cache: torch.Tensor, cu_seqlens_q: torch.Tensor | None, seq_lens: torch.Tensor,
    block_table: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, out: torch.Tensor,
    k_scale: float = 1.0, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write out [T, H, R]: see mla_prefill; without cu_seqlens_q each sequence has one query, as in mla_decode."""
    batch, (heads, size), rank = len(seq_lens), q.shape[1:], out.shape[2]
    if batch == 0 or max_seqlen_q == 0:
        return out
    # float32 tiles of 512 channels and 32 keys would exceed shared memory with two stages
    block_m, block_n = 16, 16 if q.dtype == torch.float32 else 32
    grid = cdiv(heads, block_m), batch
    if cu_seqlens_q is not None:
        block_m = 64 if q.dtype != torch.float32 and shared_memory(q.device) >= WIDE_TILE else 16
        grid, splits = (len(q) * heads // block_m + batch, 1), 1
    splits = splits or splits_for(q.device, math.prod(grid), max_seqlen_k)
    part, lse = out, out  # unused with one split
    if splits > 1:
        part = torch.empty(batch, heads, splits, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    block_r = max(next_power_of_2(rank), 16)
    _mla_kernel[(*grid, splits)](
        q, kv_cache, out, part, lse, seq_lens if cu_seqlens_q is None else cu_seqlens_q, seq_lens, block_table,
        *q.stride()[:2], *kv_cache.stride()[:2], *out.stride()[:2], block_table.stride(0), kv_cache.shape[1], batch,
        heads, rank, size - rank, scale * k_scale, k_scale, RAGGED=cu_seqlens_q is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", SPLITS=splits, MIN_SPLIT=MIN_SPLIT, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_R=block_r, BLOCK_P=max(next_power_of_2(size - rank), 16),
        num_warps=8 if block_m == 64 else 4, num_stages=2, **overlap(q.device, early=False),
    )  # fmt: skip
    if splits > 1:
        combine(part, lse, out)
    return out


def combine(part: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """Write out [T, H, R] from the results of splits, part [T, H, S, R] and lse [T, H, S], float32."""
    tokens, heads, splits, rank = part.shape
    _combine_kernel[(tokens * heads,)](
        part, lse, out, rank, SPLITS=splits, BLOCK_S=next_power_of_2(splits), BLOCK_R=max(next_power_of_2(rank), 16),
        num_warps=4, **overlap(out.device, early=False),
    )  # fmt: skip
