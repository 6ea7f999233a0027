"""Expert parallelism for decodes: `ep_dispatch` with the rows of each expert in a batch of fixed capacity.

The batched format of vLLM's prepare step, which grouped products with a fixed number of rows need.
"""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.expert_parallel import ep_dispatch as plain

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
    each = torch.arange(experts, device=ids.device)
    chosen = ids == each[:, None, None]  # [E, ranks * T, K]
    computed = chosen.any(2)
    counts = computed.sum(1, dtype=torch.int32)
    order = torch.argsort(~computed, dim=1, stable=True)
    there = torch.arange(order.shape[1], device=ids.device) < counts[:, None]
    of_each = torch.where(chosen, weights, 0).sum(2).gather(1, order)
    return (
        torch.where(there[..., None], rows[order], 0),
        counts,
        torch.where(there, of_each, 0),
        torch.where(there, source[order], -1),
    )


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, group: str = "tp"
) -> Batched:
    experts = parallel.divide(num_experts, parallel.communicator(group).size, "experts")
    return batched(plain.ep_dispatch(x, topk_ids, topk_weights, num_experts, group), experts)


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
