"""Triton kernels of `moe_align`: one launch with one program per expert, or two launches with one program per chunk.

With few pairs the launch dominates. With many, the one-launch kernel is limited by every expert's program reading all
pairs: on an H200 it takes 1.7 us plus about 0.019 ns x pairs x (experts + 32). A second launch costs 1 to 2 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel

CHUNKED = 1 << 16  # pairs x (experts + 32), from which two launches are faster
FILL = 256


@triton.jit
def _buckets(ids_ptr, map_ptr, at, N, E, HAS_MAP: tl.constexpr, INVALID_FIRST: tl.constexpr):
    """The bucket of each pair and whether it is kept. A bucket is an expert; with INVALID_FIRST it is the expert plus
    1, and 0 for pairs without an expert."""
    ids = tl.load(ids_ptr + at, mask=at < N, other=-1)
    kept = (ids >= 0) & (ids < E)
    bucket = tl.where(kept, ids, 0).to(tl.int32)
    if HAS_MAP:
        bucket = tl.load(map_ptr + bucket).to(tl.int32)
        kept = kept & (bucket >= 0)
        bucket = tl.where(kept, bucket, 0)
    if INVALID_FIRST:
        bucket = tl.where(kept, bucket + 1, 0)
        kept = at < N
    return bucket, kept


@triton.jit(do_not_specialize=["N", "capacity", "n_blocks"])
def expert_kernel(
    ids_ptr, map_ptr, sorted_ptr, experts_ptr, total_ptr, N, E, capacity, n_blocks, block_size,
    HAS_MAP: tl.constexpr, INVALID_FIRST: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per bucket, and no program waits for another: each counts all pairs, then places the pairs of its own
    # bucket in order. Every program reads all ids from L2; in return there is one launch and no scratch memory.
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, CHUNK)
    few = tl.arange(0, FILL)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for at in range(0, N, CHUNK):
        bucket, kept = _buckets(ids_ptr, map_ptr, at + lanes, N, E, HAS_MAP, INVALID_FIRST)
        counts += tl.histogram(bucket, BINS, mask=kept).to(tl.int32)
    padded = (counts + block_size - 1) // block_size * block_size
    total = tl.sum(padded, axis=0)
    start = tl.sum(tl.where(bins < mine, padded, 0), axis=0)
    used = start + tl.sum(tl.where(bins == mine, counts, 0), axis=0)
    end = start + tl.sum(tl.where(bins == mine, padded, 0), axis=0)
    if mine == 0:
        tl.store(total_ptr, total)
    before = start
    for at in range(0, N, CHUNK):
        bucket, kept = _buckets(ids_ptr, map_ptr, at + lanes, N, E, HAS_MAP, INVALID_FIRST)
        is_mine = (kept & (bucket == mine)).to(tl.int32)
        place = before + tl.cumsum(is_mine, axis=0) - 1
        tl.store(sorted_ptr + place, at + lanes, mask=(is_mine == 1) & (place < capacity))
        before += tl.sum(is_mine, axis=0)
    for at in range(used, end, FILL):
        tl.store(sorted_ptr + at + few, N + 0 * few, mask=(at + few < end) & (at + few < capacity))
    for at in range(start // block_size, end // block_size, FILL):
        inside = (at + few < end // block_size) & (at + few < n_blocks)
        tl.store(experts_ptr + at + few, mine - INVALID_FIRST + 0 * few, mask=inside)
    # The programs share the padding behind the last block.
    step = tl.num_programs(0) * FILL
    for at in range(total + mine * FILL, capacity, step):
        tl.store(sorted_ptr + at + few, N + 0 * few, mask=at + few < capacity)
    for at in range(total // block_size + mine * FILL, n_blocks, step):
        tl.store(experts_ptr + at + few, 0 * few, mask=at + few < n_blocks)


@triton.jit(do_not_specialize=["N", "capacity", "n_blocks"])
def count_kernel(
    ids_ptr, map_ptr, counts_ptr, sorted_ptr, experts_ptr, N, E, capacity, n_blocks,
    HAS_MAP: tl.constexpr, INVALID_FIRST: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, BINS: tl.constexpr,
    FILL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # Count the pairs of each bucket in a chunk, and fill the results with padding.
    mine = tl.program_id(0)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for at in range(0, CHUNK, PIECE):
        pairs = mine * CHUNK + at + tl.arange(0, PIECE)
        bucket, kept = _buckets(ids_ptr, map_ptr, pairs, N, E, HAS_MAP, INVALID_FIRST)
        counts += tl.histogram(bucket, BINS, mask=kept).to(tl.int32)
    tl.store(counts_ptr + mine * BINS + tl.arange(0, BINS), counts)
    few = tl.arange(0, FILL)
    step = tl.num_programs(0) * FILL
    for at in range(mine * FILL, capacity, step):
        tl.store(sorted_ptr + at + few, N + 0 * few, mask=at + few < capacity)
    for at in range(mine * FILL, n_blocks, step):
        tl.store(experts_ptr + at + few, 0 * few, mask=at + few < n_blocks)


@triton.jit(do_not_specialize=["N", "capacity", "n_blocks"])
def place_kernel(
    ids_ptr, map_ptr, counts_ptr, sorted_ptr, experts_ptr, total_ptr, N, E, capacity, n_blocks, block_size,
    HAS_MAP: tl.constexpr, INVALID_FIRST: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, BINS: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # The pairs of a chunk follow those of earlier chunks, in order. Every program adds up all counts.
    mine = tl.program_id(0)
    programs = tl.num_programs(0)
    bins = tl.arange(0, BINS)
    every = tl.zeros((ROWS, BINS), dtype=tl.int32)
    earlier = tl.zeros((ROWS, BINS), dtype=tl.int32)
    for at in range(0, programs, ROWS):
        chunks = at + tl.arange(0, ROWS)
        there = counts_ptr + chunks[:, None] * BINS + bins[None, :]
        part = tl.load(there, mask=(chunks < programs)[:, None], other=0)
        every += part
        earlier += tl.where((chunks < mine)[:, None], part, 0)
    blocks = (tl.sum(every, axis=0) + block_size - 1) // block_size
    first = tl.cumsum(blocks, axis=0) - blocks
    place = first * block_size + tl.sum(earlier, axis=0)
    if mine == 0:
        tl.store(total_ptr, tl.sum(blocks, axis=0) * block_size)
    # Program i writes block i of every bucket, then block i + programs, and so on.
    for nth in range(mine, tl.cdiv(N, block_size), programs):
        block = first + nth
        tl.store(experts_ptr + block, bins - INVALID_FIRST, mask=(nth < blocks) & (block < n_blocks))
    lanes = tl.arange(0, PIECE)
    for at in range(0, CHUNK, PIECE):
        pairs = mine * CHUNK + at + lanes
        bucket, kept = _buckets(ids_ptr, map_ptr, pairs, N, E, HAS_MAP, INVALID_FIRST)
        same = tl.where(kept, bucket, -1)[:, None] == bucket[None, :]
        rank = tl.sum((same & (lanes[:, None] < lanes[None, :])).to(tl.int32), axis=0)
        to = tl.gather(place, bucket, axis=0) + rank
        tl.store(sorted_ptr + to, pairs, mask=kept & (to < capacity))
        if CHUNK > PIECE:
            place += tl.histogram(bucket, BINS, mask=kept).to(tl.int32)


Outs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def align(
    ids: torch.Tensor, expert_map: torch.Tensor | None, outs: Outs, num_experts: int, block_size: int, first: bool
) -> None:  # fmt: skip
    """Fill outs: sorted_token_ids, expert_ids and num_tokens_post_padded. ids is contiguous; first: invalid_first."""
    if in_chunks(ids.numel(), num_experts):
        by_chunks(ids, expert_map, outs, num_experts, block_size, first)
    else:
        by_experts(ids, expert_map, outs, num_experts, block_size, first)


def in_chunks(pairs: int, num_experts: int) -> bool:
    """Return whether two launches are faster than one."""
    return pairs * (num_experts + 32) >= CHUNKED


def bins(num_experts: int, invalid_first: bool) -> int:
    return max(next_power_of_2(num_experts + invalid_first), 32)


def by_experts(
    ids: torch.Tensor, expert_map: torch.Tensor | None, outs: Outs, num_experts: int, block_size: int, first: bool
) -> None:  # fmt: skip
    """Run the one-launch kernel; see `align`."""
    chunk = min(max(next_power_of_2(ids.numel()), 128), 4096)
    launch_kernel(
        expert_kernel, (num_experts + first,),
        ids, expert_map, *outs, ids.numel(), num_experts, outs[0].numel(), outs[1].numel(), block_size,
        HAS_MAP=expert_map is not None, INVALID_FIRST=first, CHUNK=chunk, BINS=bins(num_experts, first),
        FILL=min(chunk, FILL), num_warps=4 if chunk <= 1024 else 8,
    )  # fmt: skip


def chunk_size(pairs: int, buckets: int) -> int:
    """Return the pairs per program, which are compared with each other; each program reads the counts of all chunks."""
    most = min(max(32768 // buckets, 16), 128)
    return max(next_power_of_2(cdiv(pairs, most)), 64)


def by_chunks(
    ids: torch.Tensor, expert_map: torch.Tensor | None, outs: Outs, num_experts: int, block_size: int, first: bool
) -> None:  # fmt: skip
    """Run the two kernels over chunks; see `align`."""
    buckets = bins(num_experts, first)
    chunk = chunk_size(ids.numel(), buckets)
    programs = max(cdiv(ids.numel(), chunk), 1)
    counts = torch.empty(programs, buckets, dtype=torch.int32, device=ids.device)
    sizes = (ids.numel(), num_experts, outs[0].numel(), outs[1].numel())
    # Triton's histogram needs at least one value per thread.
    launch_kernel(
        count_kernel, (programs,),
        ids, expert_map, counts, *outs[:2], *sizes, HAS_MAP=expert_map is not None, INVALID_FIRST=first, CHUNK=chunk,
        PIECE=min(chunk, 512), BINS=buckets, FILL=FILL, num_warps=min(chunk // 32, 4),
    )  # fmt: skip
    rows = min(next_power_of_2(programs), max(4096 // buckets, 1))
    launch_kernel(
        place_kernel, (programs,),
        ids, expert_map, counts, *outs, *sizes, block_size, HAS_MAP=expert_map is not None, INVALID_FIRST=first,
        CHUNK=chunk, PIECE=min(chunk, 128), BINS=buckets, ROWS=rows, num_warps=4,
    )  # fmt: skip
