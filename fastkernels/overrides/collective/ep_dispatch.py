"""Expert parallelism: every rank gets the tokens of all ranks that one of its experts computes.

The contract of vLLM's prepare step, with fixed sizes: a captured graph can be replayed for any routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.all_gather import all_gather

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
    return [_own(every, num_experts, rank, len(x)) for rank in range(len(x))]


def _own(every: Sequence[torch.Tensor], num_experts: int, rank: int, size: int) -> Dispatched:
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


def _over(
    gather: Callable[..., torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: str
) -> list[torch.Tensor]:
    """The three tensors of all ranks, by one exchange of bytes."""
    tokens = x.shape[0]
    given = (x.contiguous(), ids.contiguous(), weights.contiguous())
    parts = [t.view(tokens, -1).view(torch.uint8) for t in given]
    together = gather(torch.cat(parts, 1), group)
    found, at = [], 0
    for t, part in zip(given, parts, strict=True):
        piece = together[:, at : at + part.shape[1]].contiguous()
        found.append(piece.view(t.dtype).view(-1, *t.shape[1:]))
        at += part.shape[1]
    return found


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    comm = parallel.communicator(group)
    every = _over(all_gather, x, topk_ids, topk_weights, group)
    return _own(every, num_experts, comm.rank, comm.size)


def _reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Dispatched:
    comm = parallel.communicator(group)
    every = [
        torch.cat(exchange.gathered("ep_dispatch", t, group)) if comm.size > 1 else t.clone()
        for t in (x, topk_ids, topk_weights)
    ]
    return _own(every, num_experts, comm.rank, comm.size)


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
        Provider("composed", _composed, devices=exchange.BOTH),
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
