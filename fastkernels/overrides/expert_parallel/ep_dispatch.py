"""Expert parallelism: every rank gets the tokens of all ranks that one of its experts computes.

The contract of vLLM's prepare step, with fixed sizes: a captured graph can be replayed for any routing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.communicator import Symmetric
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.all_gather import all_gather
from fastkernels.overrides.collective.words import (
    received,
    renewed,
    send,
    state_of,
    turn_of,
    words_from,
    words_of,
)
from fastkernels.overrides.kit.fp8 import fp8_inverse, fp8_scale, to_fp8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2

MOST_IDS = 8192  # of a rank's tokens, which one program holds
WIDEST = 4096  # words of a row, which one program holds
ONE_WARP = 32  # experts of a token, see `received`

Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    group: str = "tp",
) -> list[Dispatched]:
    """x: [T, H], topk_ids: [T, K] int32, topk_weights: [T, K] of each rank. Rank r has part r of the E experts.

    Returns for each rank (rows [ranks * T, H], ids [ranks * T, K] int32, weights [ranks * T, K], source [ranks * T]
    int32). The rows of tokens with an expert there come first, in order of rank and token; the others are zero. ids
    are numbers among the rank's own experts, -1 for others, whose weights are 0. source: rank * T + token, then -1.
    An id that is not in 0 .. E - 1 is no expert.
    """
    every = torch.cat(x), torch.cat(topk_ids), torch.cat(topk_weights)
    return [own_part(every, num_experts, rank, len(x)) for rank in range(len(x))]


def own_part(every: Sequence[torch.Tensor], num_experts: int, rank: int, size: int) -> Dispatched:
    """The part of one rank, of (x, ids, weights) of all ranks. Does not synchronize with the device."""
    x, ids, weights = every
    count = parallel.divide(num_experts, size, "experts")
    local = ids - rank * count
    own = (local >= 0) & (local < count)
    wanted = own.any(1)
    order = torch.argsort(~wanted, stable=True)  # [ranks * T]: wanted tokens first, each part in order
    there = wanted[order]
    rows = torch.where(there[:, None], x.view(_bits(x))[order], 0).view(x.dtype)
    new_ids = torch.where(own, local, -1)[order].to(torch.int32)
    new_weights = torch.where(own, weights, 0)[order]
    return rows, new_ids, new_weights, torch.where(there, order, -1).to(torch.int32)


def _bits(x: torch.Tensor) -> torch.dtype:
    return exchange.WORDS[x.element_size()]


def check_routing(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise ValueError for ids and weights that are not those of x's tokens."""
    if x.dim() != 2 or topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or len(x) != len(topk_ids):
        found = ", ".join(f"{tuple(t.shape)}" for t in (x, topk_ids, topk_weights))
        raise ValueError(f"ep_dispatch takes x [T, H], topk_ids [T, K] and topk_weights [T, K], got {found}")
    if topk_ids.is_floating_point() or not topk_weights.is_floating_point():
        found = f"{topk_ids.dtype} and {topk_weights.dtype}"
        raise ValueError(f"ep_dispatch takes integer topk_ids and floating topk_weights, got {found}")


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    check_routing(x, topk_ids, topk_weights)
    comm, call = parallel.communicator(group), f"ep_dispatch to {num_experts} experts"
    every = exchange.gathered_tensors(call, all_gather, (x, topk_ids, topk_weights), group)
    return own_part(every, num_experts, comm.rank, comm.size)


def _reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    comm = parallel.communicator(group)
    every = [torch.cat(exchange.gathered("ep_dispatch", t, group)) for t in (x, topk_ids, topk_weights)]
    return own_part(every, num_experts, comm.rank, comm.size)


@triton.jit(do_not_specialize=["tokens", "polls"])
def _dispatch_kernel(
    x_ptr, ids_ptr, weights_ptr, rows_ptr, scales_ptr, out_ids_ptr, out_weights_ptr, source_ptr,
    table_ptr, calls_ptr, failed_ptr, words_at, polls, tokens, W, groups, K, experts, least,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, TOPK: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program b sends token b // SIZE to the peer b % SIZE, and then has that peer's token of the same number. A token's
    # message: (whether the peer wants it, how many it wants before it and in all), ids, weights, row, scales. So no
    # program needs to know the routing of other ranks to place its row. Rows that the peer does not want are not sent.
    peer, t = tl.program_id(0) % SIZE, tl.program_id(0) // SIZE
    head, row_words = (1 + 2 * K + 3) // 4 * 4, (W + 3) // 4 * 4
    each = head + row_words + (groups + 3) // 4 * 4
    cols, k, tok = tl.arange(0, BLOCK), tl.arange(0, TOPK), tl.arange(0, TOKENS)
    in_row, in_ids = cols < W, k < K

    # the row of token t
    if GROUP == 0:
        word = tl.load(x_ptr + t.to(tl.int64) * W + cols, mask=in_row, other=0)
        scale = tl.zeros((1,), tl.float32)
        g = tl.arange(0, 1)
    else:
        GROUPS: tl.constexpr = BLOCK * 4 // GROUP
        g = tl.arange(0, GROUPS)
        at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(x_ptr + t.to(tl.int64) * 4 * W + at, mask=(g < groups)[:, None], other=0.0).to(tl.float32)
        scale = fp8_scale(tl.max(tl.abs(x), axis=1), least, False)
        q = to_fp8(x * fp8_inverse(scale)[:, None]).to(tl.uint8, bitcast=True)
        # Pairs first. With four bytes at once, ptxas (CUDA 12.8) takes some from a register that nothing has written.
        even, odd = tl.split(tl.reshape(q, (2 * BLOCK, 2)))
        pair = even.to(tl.uint16) | (odd.to(tl.uint16) << 8)
        even_pair, odd_pair = tl.split(tl.reshape(pair, (BLOCK, 2)))
        word = (even_pair.to(tl.uint32) | (odd_pair.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    in_scales = g < groups

    # which of this rank's tokens the peer wants, and which this rank wants
    first = peer * experts
    ids = tl.load(
        ids_ptr + tok[:, None] * K + k[None, :], mask=(tok < tokens)[:, None] & in_ids[None, :], other=-1
    )
    wanted = tl.max(((ids >= first) & (ids < first + experts)).to(tl.int32), axis=1)
    is_wanted = tl.sum(tl.where(tok == t, wanted, 0))
    before = tl.sum(tl.where(tok < t, wanted, 0))
    mine = (ids >= RANK * experts) & (ids < RANK * experts + experts)
    own = tl.sum(tl.max(mine.to(tl.int32), axis=1))
    local = tl.load(ids_ptr + t * K + k, mask=in_ids, other=-1) - first
    valid = (local >= 0) & (local < experts)
    local = tl.where(valid, local, -1)
    weight = tl.where(valid, tl.load(weights_ptr + t * K + k, mask=in_ids, other=0.0), 0.0)

    last, used, part = turn_of(calls_ptr)
    if peer != RANK:
        into = words_from(table_ptr, words_at, part, peer, RANK, SIZE, WORDS) + t * each
        send(into + head + cols, word, in_row & (is_wanted > 0))
        if GROUP > 0:
            bits = scale.to(tl.int32, bitcast=True)
            send(into + head + row_words + g, bits, in_scales & (is_wanted > 0))
        send(into + 1 + k, local + 1, in_ids)
        send(into + 1 + K + k, weight.to(tl.int32, bitcast=True), in_ids)
        tl.store(into, is_wanted | (before << 1) | (tl.sum(wanted) << 16), cache_modifier=".wt")
    renewed(table_ptr, calls_ptr, words_at, last, used, part, tokens * each, RANK, SIZE, WORDS, BLOCK)

    # Not [GROUPS]: of 64 scales each of 8 warps would wait for a copy of its own, see `received`.
    sent = tl.zeros((BLOCK,), tl.int32)
    total, base = 0, 0  # wanted tokens of all ranks, and of those before the peer
    one = tl.arange(0, 1)
    for p in tl.static_range(SIZE):
        count = own
        if p != RANK:
            theirs = words_from(table_ptr, words_at, part, RANK, p, SIZE, WORDS)
            count = tl.sum(received(theirs + one, one < 1, failed_ptr, p, polls)) >> 16
        total += count
        base += tl.where(p < peer, count, 0)
    if peer != RANK:
        theirs = words_from(table_ptr, words_at, part, RANK, peer, SIZE, WORDS) + t * each
        meta = tl.sum(received(theirs + one, one < 1, failed_ptr, peer, polls))
        is_wanted, before = meta & 1, (meta & 0xFFFF) >> 1
        local = received(theirs + 1 + k, in_ids, failed_ptr, peer, polls) - 1
        weight = received(theirs + 1 + K + k, in_ids, failed_ptr, peer, polls).to(tl.float32, bitcast=True)
        if is_wanted > 0:
            word = received(theirs + head + cols, in_row, failed_ptr, peer, polls)
            if GROUP > 0:
                sent = received(theirs + head + row_words + cols, cols < groups, failed_ptr, peer, polls)
    to = tl.where(is_wanted > 0, base + before, total + peer * tokens - base + t - before)
    word = tl.where(is_wanted > 0, word, 0)
    # Words of a rank that did not come are no counts, and must not become addresses.
    inside = (to >= 0) & (to < SIZE * tokens)
    tl.store(rows_ptr + to.to(tl.int64) * W + cols, word, mask=in_row & inside)
    if GROUP > 0:
        if peer == RANK:
            scale = tl.where(is_wanted > 0, scale, 0.0)
            tl.store(scales_ptr + to * groups + g, scale, mask=in_scales & inside)
        else:
            theirs_scale = sent.to(tl.float32, bitcast=True)  # zeros if the token is not wanted
            tl.store(scales_ptr + to * groups + cols, theirs_scale, mask=(cols < groups) & inside)
    tl.store(out_ids_ptr + to * K + k, local, mask=in_ids & inside)
    tl.store(out_weights_ptr + to * K + k, weight, mask=in_ids & inside)
    tl.store(source_ptr + to, tl.where(is_wanted > 0, peer * tokens + t, -1), mask=inside)


def launch(
    op: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str,
    quantized: int = 0, least: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One kernel for a call that `not_launched` accepted: (rows, scales, ids, weights, source).

    quantized: channels of a scale of rows in float8; 0: rows as they are, and no scales. least: see quantize_fp8
    """
    check_routing(x, topk_ids, topk_weights)
    symmetric = exchange.symmetric_of(op, x, group)
    (tokens, hidden), k, ranks = x.shape, topk_ids.shape[1], symmetric.size
    experts = parallel.divide(num_experts, ranks, "experts")
    made = {"device": x.device}
    every = ranks * tokens
    groups = hidden // quantized if quantized else 0
    rows = torch.empty((every, hidden), dtype=torch.float8_e4m3fn if quantized else x.dtype, **made)  # type: ignore[call-overload]
    scales = torch.empty((every, groups), dtype=torch.float32, **made)  # type: ignore[call-overload]
    ids = torch.empty((every, k), dtype=torch.int32, **made)  # type: ignore[call-overload]
    weights = torch.empty((every, k), dtype=torch.float32, **made)  # type: ignore[call-overload]
    source = torch.empty(every, dtype=torch.int32, **made)  # type: ignore[call-overload]
    if tokens:
        width = hidden * rows.element_size() // 4
        block = next_power_of_2(groups) * quantized // 4 if quantized else next_power_of_2(width)
        _dispatch_kernel[(every,)](
            x.contiguous() if quantized else x.contiguous().view(torch.int32), topk_ids.contiguous(),
            topk_weights.contiguous(), rows.view(torch.int32), scales, ids, weights, source, *state_of(symmetric),
            tokens, width, groups, k, experts, least, TOKENS=next_power_of_2(tokens), TOPK=next_power_of_2(k),
            GROUP=quantized, BLOCK=block, num_warps=min(max(block // 128, 1), 8), **words_of(symmetric),
        )  # fmt: skip
    return rows, scales, ids, weights, source


def not_launched(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, group: str, quantized: int = 0
) -> str | None:
    """Why `launch` cannot run: no symmetric memory, other dtypes, or more tokens than fit into a small message."""
    if (reason := exchange.unsupported(x[:0], group, 1)) is not None:
        return reason
    if topk_ids.dtype != torch.int32 or topk_weights.dtype != torch.float32:
        return f"ids must be int32 and weights float32, got {topk_ids.dtype} and {topk_weights.dtype}"
    (tokens, hidden), k = x.shape, topk_ids.shape[1]
    itemsize = 1 if quantized else x.element_size()
    if hidden * itemsize % 4 or hidden * itemsize > 4 * WIDEST:
        return f"rows of {hidden * itemsize} bytes: at most {4 * WIDEST}, and a multiple of 4"
    if quantized and (quantized & (quantized - 1) or quantized < 4):
        return f"{quantized} channels of a scale are no power of two from 4 on"
    if not quantized and x.dtype not in exchange.SUMS:
        return f"rows are in float32, bfloat16 or float16, not in {x.dtype}"
    if k > ONE_WARP:
        return f"{k} experts of a token: at most {ONE_WARP}"
    if next_power_of_2(max(tokens, 1)) * next_power_of_2(k) > MOST_IDS:
        return f"{tokens} tokens of {k} experts are more than {MOST_IDS} ids"
    groups = hidden // quantized if quantized else 0
    each = sum(cdiv(n, 4) * 4 for n in (1 + 2 * k, hidden * itemsize // 4, groups))
    if tokens * each > Symmetric.words(parallel.communicator(group).size):
        return f"{4 * tokens * each} bytes are more than a small message"
    return None


def _triton(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    rows, _, ids, weights, source = launch("ep_dispatch", x, topk_ids, topk_weights, num_experts, group)
    return rows, ids, weights, source


def _unsupported(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> str | None:
    return not_launched(x, topk_ids, topk_weights, group)


def _measured(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> str | None:
    """For groups in which these kernels were measured, see measure.choose_experts."""
    return not_measured("ep_dispatch", x.nbytes, group) or not_launched(x, topk_ids, topk_weights, group)


def not_measured(op: str, nbytes: int, group: str) -> str | None:
    """Why the kernel of an op is not used for so many bytes of a rank's tokens, as they are sent."""
    if nbytes > parallel.communicator(group).faster.get(op, -1):
        return ForOthers("not measured to be faster in this group")
    return None


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    tokens = x.shape[0] * parallel.communicator(group).size
    made = [
        torch.empty((tokens, *t.shape[1:]), dtype=t.dtype, device=x.device)
        for t in (x, topk_ids.to(torch.int32), topk_weights)
    ]
    return made[0], made[1], made[2], torch.empty(tokens, dtype=torch.int32, device=x.device)


ep_dispatch = define(
    "ep_dispatch(Tensor x, Tensor topk_ids, Tensor topk_weights, int num_experts, str group=\"tp\")"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("measured", _triton, supports=_measured),
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip


def routed(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Different experts for each token."""
    return call.rand(shape[0], call["experts"]).topk(shape[1], dim=1).indices.to(dtype)


SPEC = OpSpec(
    name="ep_dispatch",
    level=2,
    reference=reference,
    op=ep_dispatch,
    calls=("all_gather",),
    ranks="ranks",
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("topk_ids", "tokens topk", "int32", values=routed),
        Tensor("topk_weights", "tokens topk", "float32"),
        Scalar("num_experts", "experts"),
        Scalar("group", default="tp"),
    ),
    outputs=(
        Tensor("rows", "ranks*tokens hidden"),
        Tensor("ids", "ranks*tokens topk", "int32"),
        Tensor("weights", "ranks*tokens topk", "float32"),
        Tensor("source", "ranks*tokens", "int32"),
    ),
    axes={
        "ranks": Axis.option(2),
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "topk": Axis.option(),
        "experts": Axis.option(),
    },
    constraints=("topk <= experts", "experts % ranks == 0"),
    flops="0",
    traffic="(ranks - 1) * tokens * (hidden * itemsize(dtype) + 8 * topk)",
    cases=(
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048, "topk": 8, "experts": 128}, weight=64, tags=("model",)),
        Case("qwen3_prefill", {"tokens": 1024, "hidden": 2048, "topk": 8, "experts": 128}, weight=4, tags=("model",)),
        Case("mixtral_decode_8", {"tokens": 4, "hidden": 4096, "topk": 2, "experts": 8}, weight=16, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1, "topk": 1, "experts": 6}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 100, "topk": 3, "experts": 12}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128, "topk": 2, "experts": 6}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "topk": 6, "experts": 6}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5, "topk": 1, "experts": 60}, tags=("odd",)),
    ),
)  # fmt: skip
