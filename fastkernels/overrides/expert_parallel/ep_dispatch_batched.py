"""Expert parallelism for decodes: `ep_dispatch` with the rows of each expert in a batch of fixed capacity.

The batched format of vLLM's prepare step, which grouped products with a fixed number of rows need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.expert_parallel import ep_dispatch as plain
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2

MOST_ROWS = 2048  # of all ranks, whose experts one program holds
ROWS = 8  # that one program places

Batched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    group: str = "tp",
) -> list[Batched]:
    """Arguments as in `ep_dispatch`: x [T, H], topk_ids [T, K] int32 and topk_weights [T, K] of each rank.

    Returns for each rank, with its E = num_experts / ranks experts, (rows [E, ranks * T, H], counts [E] int32,
    weights [E, ranks * T], source [E, ranks * T] int32). The first counts[e] rows of expert e are the tokens that it
    computes, in order of source = rank * T + token. Rows and weights behind them are 0, their source is -1.
    """
    every = torch.cat(x), torch.cat(topk_ids), torch.cat(topk_weights)
    experts = parallel.divide(num_experts, len(x), "experts")
    return [batched(plain.own_part(every, num_experts, rank, len(x)), experts) for rank in range(len(x))]


def batched(dispatched: plain.Dispatched, experts: int) -> Batched:
    """The result of `ep_dispatch` with the rows of each expert in a batch. Does not synchronize with the device."""
    rows, ids, weights, source = dispatched
    order, there, counts, of_each = order_of(ids, weights, experts)
    return at(rows, order, there), counts, of_each, torch.where(there, source[order], -1)


def order_of(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """(row of each place [E, ranks * T], whether there is one, counts [E], weights [E, ranks * T])"""
    each = torch.arange(experts, device=ids.device)
    chosen = ids == each[:, None, None]  # [E, ranks * T, K]
    computed = chosen.any(2)
    counts = computed.sum(1, dtype=torch.int32)
    order = torch.argsort(~computed, dim=1, stable=True)
    there = torch.arange(order.shape[1], device=ids.device) < counts[:, None]
    of_each = torch.where(chosen, weights, 0).sum(2).gather(1, order)
    return order, there, counts, torch.where(there, of_each, 0)


def at(rows: torch.Tensor, order: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The rows in this order; zeros where there is none."""
    words = rows.view(exchange.WORDS[rows.element_size()])
    return torch.where(there[..., None], words[order], 0).view(rows.dtype)


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Batched:
    experts = parallel.divide(num_experts, parallel.communicator(group).size, "experts")
    return batched(plain.ep_dispatch(x, topk_ids, topk_weights, num_experts, group), experts)


@triton.jit(do_not_specialize=["every"])
def _pack_kernel(
    rows_ptr, scales_ptr, ids_ptr, weights_ptr, source_ptr, out_ptr, out_scales_ptr, counts_ptr, out_weights_ptr,
    out_source_ptr, every, W, groups, K,
    EVERY: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # Program (e, b) places block b of the dispatched rows in the batch of expert e: those that it computes first, in
    # order, and zeros for each of the others behind them. So every place is written once.
    e, first = tl.program_id(0), tl.program_id(1) * ROWS
    tok, k, i = tl.arange(0, EVERY), tl.arange(0, TOPK), first + tl.arange(0, ROWS)
    in_ids, inside = k < K, i < every
    mask = (tok < every)[:, None] & in_ids[None, :]
    ids = tl.load(ids_ptr + tok[:, None] * K + k[None, :], mask=mask, other=-1)
    computed = tl.max((ids == e).to(tl.int32), axis=1)
    count = tl.sum(computed)
    before = tl.sum(tl.where(tok[None, :] < i[:, None], computed[None, :], 0), axis=1)

    mask = inside[:, None] & in_ids[None, :]
    chosen = tl.load(ids_ptr + i[:, None] * K + k[None, :], mask=mask, other=-1) == e
    weight = tl.load(weights_ptr + i[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.sum(tl.where(chosen, weight, 0.0), axis=1)  # 0 for a row that it does not compute
    there = tl.max(chosen.to(tl.int32), axis=1) > 0
    source = tl.load(source_ptr + i, mask=inside, other=-1)
    place = e.to(tl.int64) * every + tl.where(there, before, count + i - before)
    tl.store(out_weights_ptr + place, weight, mask=inside)
    tl.store(out_source_ptr + place, tl.where(there, source, -1), mask=inside)
    if first == 0:
        tl.store(counts_ptr + e, count)

    row, there = i.to(tl.int64)[:, None], (inside & there)[:, None]
    for start in range(0, W, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        word = tl.load(rows_ptr + row * W + cols, mask=there & (cols < W), other=0)
        tl.store(out_ptr + place[:, None] * W + cols, word, mask=inside[:, None] & (cols < W))
    if GROUPS > 0:
        g = tl.arange(0, GROUPS)[None, :]
        scale = tl.load(scales_ptr + row * groups + g, mask=there & (g < groups), other=0.0)
        tl.store(out_scales_ptr + place[:, None] * groups + g, scale, mask=inside[:, None] & (g < groups))


def pack(
    dispatched: plain.Dispatched, experts: int, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`batched` as one kernel, for a call that `not_packed` accepted: (rows, scales, counts, weights, source)."""
    rows, ids, weights, source = (t.contiguous() for t in dispatched)
    (every, k), hidden = ids.shape, rows.shape[1]
    width = next(w for w in exchange.WORDS if hidden * rows.element_size() % w == 0)
    words = rows.view(torch.uint8).view(exchange.WORDS[width])
    out = words.new_empty(experts, every, words.shape[1])
    # Without rows there is no program, and nothing but the counts.
    counts = ids.new_empty(experts) if every else ids.new_zeros(experts)
    out_weights, out_source = weights.new_empty(experts, every), source.new_empty(experts, every)
    groups = 0 if scales is None else scales.shape[1]
    out_scales = None if scales is None else scales.new_empty(experts, every, groups)
    if every:
        _pack_kernel[(experts, cdiv(every, ROWS))](
            words, scales, ids, weights, source, out, out_scales, counts, out_weights, out_source, every,
            words.shape[1], groups, k, EVERY=next_power_of_2(every), TOPK=next_power_of_2(k), ROWS=ROWS,
            BLOCK=min(next_power_of_2(words.shape[1]), 256), GROUPS=next_power_of_2(groups) if groups else 0,
        )  # fmt: skip
    return out.view(torch.uint8).view(rows.dtype), out_scales, counts, out_weights, out_source


def not_packed(tokens: int, k: int, group: str) -> str | None:
    """Why `pack` cannot run: the experts of all tokens of all ranks are more than a program holds."""
    every = parallel.communicator(group).size * tokens
    if every > MOST_ROWS:
        return f"{every} rows of all ranks: at most {MOST_ROWS}"
    if next_power_of_2(max(every, 1)) * next_power_of_2(k) > plain.MOST_IDS:
        return f"{every} rows of {k} experts are more than {plain.MOST_IDS} ids"
    return None


def _triton(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Batched:
    experts = parallel.divide(num_experts, parallel.communicator(group).size, "experts")
    sent = plain.ep_dispatch(x, topk_ids, topk_weights, num_experts, group)
    rows, _, counts, weights, source = pack(sent, experts)
    return rows, counts, weights, source


def _unsupported(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> str | None:
    return not_packed(x.shape[0], topk_ids.shape[1], group)


def _reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Batched:
    comm = parallel.communicator(group)
    parts = [exchange.gathered("ep_dispatch_batched", t, group) for t in (x, topk_ids, topk_weights)]
    return reference(parts[0], parts[1], parts[2], num_experts)[comm.rank]


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Batched:
    size = parallel.communicator(group).size
    experts, rows = num_experts // size, size * x.shape[0]
    return (
        x.new_empty(experts, rows, x.shape[1]),
        topk_ids.new_empty(experts, dtype=torch.int32),
        topk_weights.new_empty(experts, rows),
        topk_ids.new_empty(experts, rows, dtype=torch.int32),
    )


ep_dispatch_batched = define(
    "ep_dispatch_batched(Tensor x, Tensor topk_ids, Tensor topk_weights, int num_experts, str group=\"tp\")"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="ep_dispatch_batched",
    level=2,
    reference=reference,
    op=ep_dispatch_batched,
    calls=("ep_dispatch",),
    ranks="ranks",
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("topk_ids", "tokens topk", "int32", values=plain.routed),
        Tensor("topk_weights", "tokens topk", "float32"),
        Scalar("num_experts", "experts"),
        Scalar("group", default="tp"),
    ),
    outputs=(
        Tensor("rows", "local ranks*tokens hidden"),
        Tensor("counts", "local", "int32"),
        Tensor("weights", "local ranks*tokens", "float32"),
        Tensor("source", "local ranks*tokens", "int32"),
    ),
    axes={
        "ranks": Axis.option(2),
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "topk": Axis.option(),
        "experts": Axis.option(),
        "local": Axis(Expr("experts // ranks")),
    },
    constraints=("topk <= experts", "experts % ranks == 0"),
    flops="0",
    traffic="(ranks - 1) * tokens * (hidden * itemsize(dtype) + 8 * topk)",
    cases=(
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048, "topk": 8, "experts": 128}, weight=64, tags=("model",)),
        Case("mixtral_decode_8", {"tokens": 4, "hidden": 4096, "topk": 2, "experts": 8}, weight=16, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1, "topk": 1, "experts": 6}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 20, "topk": 3, "experts": 12}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128, "topk": 2, "experts": 6}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "topk": 6, "experts": 6}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5, "topk": 1, "experts": 60}, tags=("odd",)),
    ),
)  # fmt: skip
