"""Small messages: a word that has not come yet is empty, so that data need neither a flag nor a fence.

Each rank writes its message into the peers' buffers, and a peer reads its own buffer until no word is empty. Kernels
have one dimension of programs. A program first sends, then empties words of the last message, and then waits for its
own: see `renewed`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.communicator import Symmetric
from fastkernels.overrides.collective.exchange import SUMS, buffer_of, unit_of
from fastkernels.overrides.kit.launch import cdiv

EMPTY = tl.constexpr(-1)  # two NaNs, or one
INSTEAD = tl.constexpr(0x7FFF7FFF)  # other NaNs, which are sent for them
MOST_TENSORS = 4  # of one call of `gathered_words`
FLOATS = (*SUMS, torch.float8_e4m3fn)  # dtypes whose -1 is NaN, as INSTEAD is
INTS = (torch.int32, torch.int64)  # dtypes of numbers below 2^31 - 1, which `gathered_words` passes


@triton.jit
def unpacked(word, KIND: tl.constexpr):
    """The one or two numbers of a word in float32: KIND 0 is float32, 1 bfloat16, 2 float16."""
    if KIND == 0:
        low = word.to(tl.float32, bitcast=True)
        high = low
    elif KIND == 1:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = ((word >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def packed(low, high, KIND: tl.constexpr):
    """The inverse of `unpacked`, rounded to nearest."""
    if KIND == 0:
        word = low.to(tl.int32, bitcast=True)
    elif KIND == 1:
        word = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        word = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word |= high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return word


@triton.jit
def turn_of(calls_ptr):
    """(part of the last message, its words, part of this one): calls use the three parts of a buffer in turn."""
    last = tl.load(calls_ptr)
    return last, tl.load(calls_ptr + 1), tl.where(last == 2, 0, last + 1)


@triton.jit
def words_from(table_ptr, words_at, part, of, source, SIZE: tl.constexpr, WORDS: tl.constexpr):
    """In the buffer of rank `of`, the words that rank `source` writes in this part."""
    return buffer_of(table_ptr, of, tl.int32) + words_at + (part * SIZE + source) * WORDS


@triton.jit
def send(into, word, mask):
    """Write words to a peer's buffer."""
    tl.store(into, tl.where(word == EMPTY, INSTEAD, word), mask=mask, cache_modifier=".wt")


@triton.jit
def renewed(
    table_ptr, calls_ptr, words_at, last, used, part, total,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Empty the last message's part; this one, of `total` words, is then the last. Once in a program, after it sent.

    A peer writes to the emptied part two calls later: it has then ended the call between, for which it needed words
    that this rank sent after it had emptied the part. So every call sends a word to each peer, which waits for it.
    """
    programs = tl.num_programs(0)
    for start in range(tl.program_id(0) * BLOCK, used, programs * BLOCK):
        old = start + tl.arange(0, BLOCK)
        for p in tl.static_range(SIZE):
            if p != RANK:
                mine = words_from(table_ptr, words_at, last, RANK, p, SIZE, WORDS)
                tl.store(mine + old, tl.full((BLOCK,), EMPTY, tl.int32), mask=old // 4 < (used + 3) // 4)
    # All programs have read the state when the last one changes it.
    if tl.atomic_add(calls_ptr + 2, 1, sem="acq_rel") == programs - 1:
        tl.store(calls_ptr, part)
        tl.store(calls_ptr + 1, total)
        tl.store(calls_ptr + 2, 0)


@triton.jit
def received(at, mask, failed_ptr, source, polls):
    """The words at these pointers, as soon as none is empty. After `polls` turns `failed` names their source.

    There must be at most 32 words, or at least 32 for each warp. Between these, several warps load the same words, each
    for itself, and count the empty ones in the same place: one that has seen all words would end the wait of another
    that has not.
    """
    got = tl.load(at, mask=mask, other=0, volatile=True)
    missing = tl.sum((got == EMPTY).to(tl.int32))
    left = polls
    while (missing > 0) & (left > 0):
        left -= 1
        got = tl.load(at, mask=mask, other=0, volatile=True)
        missing = tl.sum((got == EMPTY).to(tl.int32))
    if missing > 0:
        tl.store(failed_ptr, source + 1)
    return got


@triton.jit
def summed_words(
    word, at, inside, table_ptr, calls_ptr, failed_ptr, words_at, total, polls,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' words in order of rank, as `unpacked` has them. at: the place of a word in the message.

    Every program of the call must come here once; `total` is the words of the message.
    """
    BLOCK: tl.constexpr = word.shape[0]
    last, used, part = turn_of(calls_ptr)
    for p in tl.static_range(SIZE):
        if p != RANK:
            send(words_from(table_ptr, words_at, part, p, RANK, SIZE, WORDS) + at, word, inside)
    renewed(table_ptr, calls_ptr, words_at, last, used, part, total, RANK, SIZE, WORDS, BLOCK)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(SIZE):
        if p == RANK:
            a, b = unpacked(tl.where(word == EMPTY, INSTEAD, word), KIND)
        else:
            theirs = words_from(table_ptr, words_at, part, RANK, p, SIZE, WORDS) + at
            a, b = unpacked(received(theirs, inside, failed_ptr, p, polls), KIND)
        low += a
        high += b
    return low, high


@triton.jit(do_not_specialize=["units", "polls"])
def _words_kernel(
    x_ptr, out_ptr, table_ptr, calls_ptr, failed_ptr, words_at, polls, units,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at // UNIT < units
    word = tl.load(x_ptr + at, mask=inside, other=0)
    low, high = summed_words(
        word, at, inside, table_ptr, calls_ptr, failed_ptr, words_at, units * UNIT, polls, RANK, SIZE, WORDS, KIND
    )  # fmt: skip
    tl.store(out_ptr + at, packed(low, high, KIND), mask=inside)


def sum_words(x: torch.Tensor, symmetric: Symmetric) -> torch.Tensor:
    """The sum of all ranks' x, a small message; flat. All ranks must launch the same."""
    out = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    source, into = x.view(-1).view(torch.int32), out.view(torch.int32)
    n = source.numel()
    unit, block = unit_of(n, 4), block_of(n)
    if n:
        _words_kernel[(cdiv(n, block),)](
            source, into, *state_of(symmetric), n // unit, KIND=SUMS.index(x.dtype), BLOCK=block, UNIT=unit,
            num_warps=block // 128, **words_of(symmetric),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["units", "polls"])
def _scatter_kernel(
    x_ptr, out_ptr, table_ptr, calls_ptr, failed_ptr, words_at, polls, units,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    # x has a chunk of `units` units of UNIT words for each rank. A program sums its block of this rank's chunks.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at // UNIT < units
    n = units * UNIT
    last, used, part = turn_of(calls_ptr)
    for p in tl.static_range(SIZE):
        if p != RANK:
            word = tl.load(x_ptr + p * n + at, mask=inside, other=0)
            send(words_from(table_ptr, words_at, part, p, RANK, SIZE, WORDS) + at, word, inside)
    renewed(table_ptr, calls_ptr, words_at, last, used, part, n, RANK, SIZE, WORDS, BLOCK)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(SIZE):
        if p == RANK:
            a, b = unpacked(tl.load(x_ptr + p * n + at, mask=inside, other=0), KIND)
        else:
            theirs = words_from(table_ptr, words_at, part, RANK, p, SIZE, WORDS) + at
            a, b = unpacked(received(theirs, inside, failed_ptr, p, polls), KIND)
        low += a
        high += b
    tl.store(out_ptr + at, packed(low, high, KIND), mask=inside)


def scatter_words(x: torch.Tensor, symmetric: Symmetric, out: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part of the rows of the sum of all ranks' x; flat, or in `out`. Each part is a small message."""
    if out is None:
        out = torch.empty(x.numel() // symmetric.size, dtype=x.dtype, device=x.device)
    source, into = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    n = into.numel()
    unit, block = unit_of(n, 4), block_of(n)
    if n:
        _scatter_kernel[(cdiv(n, block),)](
            source, into, *state_of(symmetric), n // unit, KIND=SUMS.index(x.dtype), BLOCK=block, UNIT=unit,
            num_warps=block // 128, **words_of(symmetric),
        )  # fmt: skip
    return out


@triton.jit
def _gather_block(
    x_ptr, out_ptr, n, first, table_ptr, calls_ptr, failed_ptr, words_at, polls,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    at = (tl.program_id(0) - first) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at // UNIT < n // UNIT
    word = tl.load(x_ptr + at, mask=inside, other=0)
    tl.store(out_ptr + RANK * n + at, word, mask=inside)
    flip: tl.constexpr = -2147483648 if NUMBERS else 0  # so that -1 is not empty
    last, used, part = turn_of(calls_ptr)
    for p in tl.static_range(SIZE):
        if p != RANK:
            send(words_from(table_ptr, words_at, part, p, RANK, SIZE, WORDS) + place, word ^ flip, inside)
    total = tl.num_programs(0) * BLOCK
    renewed(table_ptr, calls_ptr, words_at, last, used, part, total, RANK, SIZE, WORDS, BLOCK)
    for p in tl.static_range(SIZE):
        if p != RANK:
            theirs = words_from(table_ptr, words_at, part, RANK, p, SIZE, WORDS) + place
            got = received(theirs, inside, failed_ptr, p, polls)
            tl.store(out_ptr + p * n + at, got ^ flip, mask=inside)


@triton.jit(do_not_specialize=["first1", "first2", "first3", "polls"])
def _gather_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, out0_ptr, out1_ptr, out2_ptr, out3_ptr, n0, n1, n2, n3, first1, first2, first3,
    table_ptr, calls_ptr, failed_ptr, words_at, polls,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, NUMBERS: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Tensor i has n_i words, and the programs from first_i on. Bit i of NUMBERS: it has integers; of UNITS: its words
    # are divisible by four.
    b = tl.program_id(0)
    if COUNT == 1 or b < first1:
        _gather_block(
            x0_ptr, out0_ptr, n0, 0, table_ptr, calls_ptr, failed_ptr, words_at, polls, RANK, SIZE, WORDS,
            NUMBERS & 1, BLOCK, 4 if UNITS & 1 else 1,
        )  # fmt: skip
    elif COUNT == 2 or b < first2:
        _gather_block(
            x1_ptr, out1_ptr, n1, first1, table_ptr, calls_ptr, failed_ptr, words_at, polls, RANK, SIZE, WORDS,
            NUMBERS & 2, BLOCK, 4 if UNITS & 2 else 1,
        )  # fmt: skip
    elif COUNT == 3 or b < first3:
        _gather_block(
            x2_ptr, out2_ptr, n2, first2, table_ptr, calls_ptr, failed_ptr, words_at, polls, RANK, SIZE, WORDS,
            NUMBERS & 4, BLOCK, 4 if UNITS & 4 else 1,
        )  # fmt: skip
    else:
        _gather_block(
            x3_ptr, out3_ptr, n3, first3, table_ptr, calls_ptr, failed_ptr, words_at, polls, RANK, SIZE, WORDS,
            NUMBERS & 8, BLOCK, 4 if UNITS & 8 else 1,
        )  # fmt: skip


def gather_words(
    tensors: list[torch.Tensor], symmetric: Symmetric, outs: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """All ranks' tensors, each one behind the other in order of rank, by one kernel. A NaN may become another NaN.

    tensors: up to four, contiguous, together a small message, see `not_gathered`
    """
    size = symmetric.size
    if outs is None:
        outs = [
            torch.empty((size * t.shape[0], *t.shape[1:]), dtype=t.dtype, device=t.device) for t in tensors
        ]
    passed = [(t, out) for t, out in zip(tensors, outs, strict=True) if t.numel()]
    if not passed:
        return outs
    sources = [t.view(-1).view(torch.int32) for t, _ in passed]
    intos = [out.view(-1).view(torch.int32) for _, out in passed]
    lengths = [t.numel() for t in sources]
    block = block_of(sum(lengths))
    firsts = [0]
    for n in lengths:
        firsts.append(firsts[-1] + cdiv(n, block))
    more = MOST_TENSORS - len(passed)
    _gather_kernel[(firsts[-1],)](
        *sources, *sources[:1] * more, *intos, *intos[:1] * more, *lengths, *[0] * more, *(firsts + [0] * more)[1:4],
        *state_of(symmetric), COUNT=len(passed), BLOCK=block, num_warps=block // 128,
        NUMBERS=sum((t.dtype in INTS) << i for i, (t, _) in enumerate(passed)),
        UNITS=sum((n % 4 == 0) << i for i, n in enumerate(lengths)), **words_of(symmetric),
    )  # fmt: skip
    return outs


def not_gathered(tensors: list[torch.Tensor], size: int) -> str | None:
    """Why `gather_words` does not pass these tensors, in a group of so many ranks."""
    if len(tensors) > MOST_TENSORS:
        return f"{len(tensors)} tensors: at most {MOST_TENSORS} are one message"
    for t in tensors:
        if t.dtype not in FLOATS + INTS:
            return f"{t.dtype}: a word of it could be an empty one"
        if t.nbytes % 4 or not t.is_contiguous() or t.storage_offset() * t.itemsize % 4:
            return "tensors must be contiguous words of four bytes"
    if sum(cdiv(t.nbytes // 4, 512) * 512 for t in tensors) > Symmetric.words(size):
        return f"{sum(t.nbytes for t in tensors)} bytes are more than {4 * Symmetric.words(size)}"
    return None


def block_of(n: int) -> int:
    """Words of a program for a message of n."""
    return 128 if n <= 1 << 15 else 512


def state_of(symmetric: Symmetric) -> tuple[Any, ...]:
    """The arguments of a kernel with words that are no constants."""
    at = symmetric.words_at(symmetric.room, symmetric.size) // 4
    return symmetric.table, symmetric.calls, symmetric.failed, at, symmetric.polls


def words_of(symmetric: Symmetric) -> dict[str, int]:
    """The constants of a kernel with words."""
    return {"RANK": symmetric.rank, "SIZE": symmetric.size, "WORDS": symmetric.words(symmetric.size)}


def is_small(x: torch.Tensor, group: str, parts: int = 1) -> bool:
    """Whether each of so many parts of x can be a small message."""
    return x.nbytes % (4 * parts) == 0 and x.nbytes <= 4 * parts * Symmetric.words(
        parallel.communicator(group).size
    )
