"""Expert parallelism: every rank gets the sum of what the experts of all ranks computed for its tokens.

The contract of vLLM's finalize step: the way back of `ep_dispatch`. The weights of experts are applied before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.communicator import Symmetric
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter, rows
from fastkernels.overrides.collective.words import (
    packed,
    received,
    renewed,
    send,
    state_of,
    turn_of,
    unpacked,
    words_from,
    words_of,
)
from fastkernels.overrides.expert_parallel.ep_dispatch import not_measured
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2

MOST_ROWS = 4096  # of all ranks, whose sources one program holds
WIDEST = 2048  # words of a row, which one program sums


def reference(x: list[torch.Tensor], source: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [ranks * T, H], source: [ranks * T] int32 of each rank: row i is of token source[i] = rank * T + token.

    Rows with the source -1 are ignored; no source is there twice. Returns [T, H] of each rank: the sum over ranks, in
    order of rank and in at least float32, in x's dtype. Tokens without a row are zero.
    """
    acc = torch.promote_types(x[0].dtype, torch.float32)
    total = exchange.total([placed(t.to(acc), s) for t, s in zip(x, source, strict=True)])
    return [part.to(t.dtype) for part, t in zip(total.chunk(len(x)), x, strict=True)]


def placed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows at their sources, zero elsewhere. Does not synchronize with the device."""
    rows = x.shape[0]
    out = torch.zeros((rows + 1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    out[torch.where(source < 0, rows, source).long()] = x
    return out[:rows]


def _check(x: torch.Tensor, source: torch.Tensor) -> None:
    if x.dim() != 2 or source.shape != x.shape[:1] or source.is_floating_point():
        raise ValueError(
            f"ep_combine takes x [ranks * T, H] and its sources [ranks * T] in int32, got {tuple(x.shape)} and"
            f" {tuple(source.shape)} in {source.dtype}"
        )


def _composed(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    _check(x, source)
    return reduce_scatter(placed(x, source), group)


def _reference(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    parts = exchange.gathered("ep_combine", placed(x, source), group)
    return exchange.total(parts).chunk(comm.size)[comm.rank].to(x.dtype)


@triton.jit(do_not_specialize=["tokens", "polls"])
def _combine_kernel(
    x_ptr, source_ptr, out_ptr, table_ptr, calls_ptr, failed_ptr, words_at, polls, tokens, W,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A program sends the row of token t of each peer, zeros if there is none, and sums the rows of its own token t.
    t = tl.program_id(0)
    at, i = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    inside = at < W
    source = tl.load(source_ptr + i, mask=i < SIZE * tokens, other=-1)
    last, used, part = turn_of(calls_ptr)
    for p in tl.static_range(SIZE):
        if p != RANK:
            row = tl.max(tl.where(source == p * tokens + t, i, -1))
            word = tl.load(x_ptr + row.to(tl.int64) * W + at, mask=inside & (row >= 0), other=0)
            send(words_from(table_ptr, words_at, part, p, RANK, SIZE, WORDS) + t * W + at, word, inside)
    renewed(table_ptr, calls_ptr, words_at, last, used, part, tokens * W, RANK, SIZE, WORDS, BLOCK)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for p in tl.static_range(SIZE):
        if p == RANK:
            row = tl.max(tl.where(source == RANK * tokens + t, i, -1))
            word = tl.load(x_ptr + row.to(tl.int64) * W + at, mask=inside & (row >= 0), other=0)
            a, b = unpacked(word, KIND)
        else:
            theirs = words_from(table_ptr, words_at, part, RANK, p, SIZE, WORDS) + t * W + at
            a, b = unpacked(received(theirs, inside, failed_ptr, p, polls), KIND)
        low += a
        high += b
    tl.store(out_ptr + t.to(tl.int64) * W + at, packed(low, high, KIND), mask=inside)


def _triton(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    _check(x, source)
    symmetric = exchange.symmetric_of("ep_combine", x, group)
    tokens, hidden = rows(x, group), x.shape[1]
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    width = hidden * x.element_size() // 4
    if tokens:
        block = next_power_of_2(width)
        _combine_kernel[(tokens,)](
            x.contiguous().view(torch.int32), source.contiguous(), out.view(torch.int32), *state_of(symmetric), tokens,
            width, KIND=exchange.SUMS.index(x.dtype), ROWS=next_power_of_2(x.shape[0]), BLOCK=block,
            num_warps=min(max(block // 128, 1), 8), **words_of(symmetric),
        )  # fmt: skip
    return out


def _unsupported(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> str | None:
    if (reason := exchange.unsupported(x[:0], group, 1, True)) is not None:
        return reason
    size, (every, hidden) = parallel.communicator(group).size, x.shape
    width = cdiv(hidden * x.element_size(), 4)
    if hidden * x.element_size() % 4 or width > WIDEST:
        return f"rows of {hidden * x.element_size()} bytes: at most {4 * WIDEST}, and a multiple of 4"
    if source.dtype != torch.int32:
        return f"sources are int32, not {source.dtype}"
    if every > MOST_ROWS:
        return f"{every} rows: at most {MOST_ROWS}"
    if every // size * width > Symmetric.words(size):
        return f"{x.nbytes // size} bytes of a rank are more than a small message"
    return None


def _measured(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> str | None:
    """For groups in which these kernels were measured, see measure.choose_experts."""
    size = parallel.communicator(group).size
    return not_measured("ep_combine", x.nbytes // size, group) or _unsupported(x, source, group)


ep_combine = define(
    'ep_combine(Tensor x, Tensor source, str group="tp") -> Tensor',
    fake=lambda x, source, group="tp": torch.empty(
        (x.shape[0] // parallel.communicator(group).size, *x.shape[1:]), dtype=x.dtype, device=x.device
    ),
    providers=(
        Provider("measured", _triton, supports=_measured),
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)


def sources(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Some of all tokens in ascending order, then -1."""
    rows = shape[0]
    wanted = call.rand(rows) < 0.7
    order = torch.argsort(~wanted, stable=True)
    return torch.where(wanted[order], order, -1).to(dtype)


SPEC = OpSpec(
    name="ep_combine",
    level=2,
    reference=reference,
    op=ep_combine,
    calls=("reduce_scatter",),
    ranks="ranks",
    arguments=(
        Tensor("x", "ranks*tokens hidden"),
        Tensor("source", "ranks*tokens", "int32", values=sources),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks - 1) * tokens * hidden",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048}, weight=64, tags=("model",)),
        Case("qwen3_prefill_2k", {"tokens": 1024, "hidden": 2048}, weight=4, tags=("model",)),
        Case("mixtral_decode_8", {"tokens": 4, "hidden": 4096}, weight=16, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
