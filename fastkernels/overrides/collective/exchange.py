"""Parts of all collectives: calls over a process group, over shared memory (CPU), and over symmetric memory (GPU)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.communicator import Symmetric
from fastkernels.core.dispatch import ForOthers, Provider
from fastkernels.overrides.kit.launch import cdiv

SUMS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # dtypes that are summed in float32, in the order of KIND
BOTH = ("cuda", "cpu")
LEAST = 4096  # bytes of a chunk that a program passes
TILE = 16384  # bytes that it loads at once
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in order of rank, in at least float32."""
    acc = torch.promote_types(tensors[0].dtype, torch.float32)
    out = tensors[0].to(acc)
    for t in tensors[1:]:
        out = out + t.to(acc)
    return out


def group_of(args: tuple[Any, ...]) -> str:
    """The name of the group: an op's last argument, which the dispatcher leaves out if it is the default."""
    return args[-1] if isinstance(args[-1], str) else parallel.TP


# -- one rank


def alone(fn: Callable[..., Any]) -> Provider:
    """The provider for a group of one rank."""

    def unsupported(*args: Any) -> str | None:
        return (
            None if parallel.communicator(group_of(args)).size == 1 else ForOthers("for a group of one rank")
        )

    return Provider("alone", fn, devices=BOTH, supports=unsupported)


# -- a process group of torch.distributed


def gathered(op: str, x: torch.Tensor, group: str) -> list[torch.Tensor]:
    """The tensors of all ranks, over the process group; of one rank, a copy."""
    comm = parallel.communicator(group)
    if comm.size == 1:
        return [x.clone()]
    x = x.contiguous()
    comm.arrive(op, x)
    parts = torch.empty((comm.size, *x.shape), dtype=x.dtype, device=x.device)
    with comm.naming(op):
        gather_into(parts.view(comm.size * x.shape[0], *x.shape[1:]), x, comm.process_group)
    return list(parts)


def gathered_tensors(
    op: str, gather: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], group: str
) -> list[torch.Tensor]:
    """Tensors [T, ...] of all ranks, by one exchange of bytes. op: names the call, which all ranks must make."""
    comm, tokens = parallel.communicator(group), given[0].shape[0]
    comm.arrive(op, *given)  # the bytes of other dtypes may be as many
    given = [t.contiguous() for t in given]
    parts = [t.view(tokens, math.prod(t.shape[1:])).view(torch.uint8) for t in given]
    together = gather(torch.cat(parts, 1), group)
    found, at = [], 0
    for t, part in zip(given, parts, strict=True):
        piece = together[:, at : at + part.shape[1]].contiguous()
        found.append(piece.view(t.dtype).view(comm.size * tokens, *t.shape[1:]))
        at += part.shape[1]
    return found


def gather_into(out: torch.Tensor, x: torch.Tensor, process_group: Any) -> None:
    # The name in torch 2.13, and the one in older versions. Into one tensor: NCCL would copy a list's tensors out.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=process_group)


def over_group(fn: Callable[..., Any]) -> tuple[Provider, Provider]:
    """A function over the process group as two providers, named after its backend on each device."""
    return Provider("nccl", fn), Provider("gloo", fn, devices=("cpu",))


# -- shared memory, on a CPU


def shared(op: str, fn: Callable[..., Any], any_order: bool = False) -> Provider:
    """A provider whose ranks read each other's tensors in shared memory.

    any_order  the result is the same in any order of ranks. A sum is only for two: gloo adds more in another order
    """

    def unsupported(x: torch.Tensor, *args: Any) -> str | None:
        comm = parallel.communicator(group_of((x, *args)))
        if not comm.room:
            return ForOthers(comm.without.get("meeting", "the group has no shared memory"))
        if x.nbytes > comm.room:
            return f"{op}: {x.nbytes} bytes are more than the {comm.room} of a rank's shared memory"
        if not any_order and comm.size > 2:
            return ForOthers("gloo adds more than two tensors in another order")
        return None

    return Provider("shared", fn, devices=("cpu",), supports=unsupported)


def exchanged(op: str, x: torch.Tensor, group: str) -> list[torch.Tensor]:
    """CPU: the tensors of all ranks; see Communicator.exchange."""
    return parallel.communicator(group).exchange(op, x.contiguous())


# -- symmetric memory, on GPUs


@triton.jit
def meet(
    table_ptr, failed_ptr, count, flags_at, polls, RANK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Signal the programs of this number in all peers, and wait for theirs. Their earlier writes are then visible."""
    b = tl.program_id(0)
    tl.debug_barrier()  # all threads of this program have written
    mine = tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int32)) + flags_at + b * SIZE
    for p in tl.static_range(SIZE):
        if p != RANK:
            theirs = tl.load(table_ptr + p).to(tl.pointer_type(tl.int32)) + flags_at + b * SIZE
            tl.atomic_xchg(theirs + RANK, count, sem="release", scope="sys")
    for p in tl.static_range(SIZE):
        if p != RANK:
            left = polls
            behind = tl.atomic_add(mine + p, 0, sem="acquire", scope="sys") - count
            while (behind < 0) & (left > 0):
                left -= 1
                behind = tl.atomic_add(mine + p, 0, sem="acquire", scope="sys") - count
            if behind < 0:
                tl.store(failed_ptr, p + 1)
    tl.debug_barrier()


@triton.jit
def buffer_of(table_ptr, rank, like):
    """The buffer of a rank as a pointer, which the compiler knows to be aligned: so its accesses are wide."""
    return tl.multiple_of(tl.load(table_ptr + rank).to(tl.pointer_type(like)), [16])


@triton.jit(do_not_specialize=["units", "each", "polls"])
def _exchange_kernel(
    x_ptr, out_ptr, table_ptr, counter_ptr, failed_ptr, units, each, region, flags_at, polls,
    RANK: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    # x has CHUNKS chunks of `units` units of UNIT elements. Program b passes `each` units of every chunk through its
    # own region, which no other program uses. It writes the halves of its region in turn, so none is written while a
    # peer still reads it: a half is used again two calls later, and all peers have arrived at the call between.
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(counter_ptr + b) + 1
    half = (2 * b + (count & 1)) * region
    cols = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    own = buffer_of(table_ptr, RANK, dtype) + half
    n = units.to(tl.int64) * UNIT
    first = b * each * UNIT
    room = each.to(tl.int64) * UNIT
    end = tl.minimum(each, units - b * each)  # in units, so that a mask is the same for all elements of one
    for c in tl.static_range(CHUNKS):
        for start in range(0, end * UNIT, BLOCK):
            at = start + cols
            value = tl.load(x_ptr + c * n + first + at, mask=at // UNIT < end)
            tl.store(own + c * room + at, value, mask=at // UNIT < end)
    meet(table_ptr, failed_ptr, count, flags_at, polls, RANK, SIZE)
    chunk: tl.constexpr = RANK if CHUNKS > 1 else 0
    for start in range(0, end * UNIT, BLOCK):
        at = start + cols
        inside = at // UNIT < end
        if SUM:
            acc = tl.zeros((BLOCK,), dtype=tl.float32)
            for p in tl.static_range(SIZE):  # in order of rank, so that all ranks get the same bits
                theirs = buffer_of(table_ptr, p, dtype) + half
                acc += tl.load(theirs + chunk * room + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + first + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            for p in tl.static_range(SIZE):
                theirs = buffer_of(table_ptr, p, dtype) + half
                value = tl.load(theirs + chunk * room + at, mask=inside)
                tl.store(out_ptr + p * n + first + at, value, mask=inside)
    tl.store(counter_ptr + b, count)


def unit_of(n: int, itemsize: int) -> int:
    """Elements of one access: 16 bytes if they divide n elements, else one."""
    return 16 // itemsize if n * itemsize % 16 == 0 else 1


def plan(n: int, chunks: int, itemsize: int) -> tuple[int, int]:
    """(programs, elements of a chunk that each passes) for chunks of n elements."""
    programs = max(1, min(Symmetric.BLOCKS, cdiv(n * itemsize, LEAST)))
    unit = 16 // itemsize
    each = cdiv(cdiv(n, programs), unit) * unit
    return cdiv(n, each) if n else 0, each


def launch(x: torch.Tensor, symmetric: Symmetric, chunks: int, add: bool) -> torch.Tensor:
    """Chunk `rank` of all ranks' x (with one chunk: x) summed, or one behind the other; flat.

    x: contiguous. All ranks must launch the same. Captured graphs can be replayed any number of times.
    """
    out = torch.empty(x.numel() // chunks * (1 if add else symmetric.size), dtype=x.dtype, device=x.device)
    source, into = x.view(-1), out
    if not add:  # bytes, in the largest words
        width = next(w for w in WORDS if x.nbytes // chunks % w == 0 and (x.numel() * x.itemsize) % w == 0)
        source, into = source.view(torch.uint8).view(WORDS[width]), out.view(torch.uint8).view(WORDS[width])
    n, itemsize = source.numel() // chunks, source.element_size()
    programs, each = plan(n, chunks, itemsize)
    unit = unit_of(n, itemsize)
    if programs:
        _exchange_kernel[(programs,)](
            source, into, symmetric.table, symmetric.counters, symmetric.failed, n // unit, each // unit,
            symmetric.room // Symmetric.BLOCKS // itemsize, 2 * symmetric.room // 4, symmetric.polls,
            RANK=symmetric.rank, SIZE=symmetric.size, CHUNKS=chunks, SUM=add, BLOCK=TILE // itemsize, UNIT=unit,
            num_warps=8,
        )  # fmt: skip
    return out


def unsupported(x: torch.Tensor, group: str, chunks: int = 1, add: bool = False) -> str | None:
    """Why `launch` cannot run: no symmetric memory, or more bytes than it has."""
    comm = parallel.communicator(group)
    if comm.symmetric is None and (reason := comm.connect()) is not None:
        return ForOthers(reason)
    assert comm.symmetric is not None
    if add and x.dtype not in SUMS:
        return f"sums are in float32, bfloat16 or float16, not in {x.dtype}"
    itemsize = x.element_size() if add else 1
    _, each = plan(x.numel() * (1 if add else x.element_size()) // chunks, chunks, itemsize)
    if chunks * each * itemsize > comm.symmetric.room // Symmetric.BLOCKS:
        return f"{x.nbytes} bytes are more than the {comm.symmetric.room} of the symmetric buffer"
    return None


def symmetric_of(op: str, x: torch.Tensor, group: str) -> Symmetric:
    """The group's symmetric memory, for a call that `unsupported` accepted."""
    comm = parallel.communicator(group)
    comm.arrive(op, x)
    assert comm.symmetric is not None
    return comm.symmetric
