"""Expert parallelism for decodes with half the bytes: `ep_dispatch_batched` of rows in float8 e4m3 with scales.

The batched format of vLLM's prepare step with quantized rows: each expert has its rows, and their scales.
"""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.expert_parallel import ep_dispatch as plain
from fastkernels.overrides.expert_parallel import ep_dispatch_batched as rows_of
from fastkernels.overrides.expert_parallel import ep_dispatch_fp8 as quantized
from fastkernels.overrides.kit.fp8 import FP8, fp8_refusal

Batched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    block: int = 128,
    group: str = "tp",
) -> list[Batched]:
    """Arguments as in `ep_dispatch_fp8`; block: channels of a scale; H: a row has one.

    Returns for each rank (rows [E, ranks * T, H] in float8 e4m3, scales [E, ranks * T, H / block] in float32, counts,
    weights, source) in the order of `ep_dispatch_batched`. Rows and scales behind the counts are 0.
    """
    experts = parallel.divide(num_experts, len(x), "experts")
    return [batched(d, experts) for d in quantized.reference(x, topk_ids, topk_weights, num_experts, block)]


def batched(dispatched: quantized.Dispatched, experts: int) -> Batched:
    """The result of `ep_dispatch_fp8` with the rows of each expert in a batch."""
    rows, scales, ids, weights, source = dispatched
    order, there, counts, of_each = rows_of.order_of(ids, weights, experts)
    source = torch.where(there, source[order], -1)
    return rows_of.at(rows, order, there), rows_of.at(scales, order, there), counts, of_each, source


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Batched:  # fmt: skip
    experts = parallel.divide(num_experts, parallel.communicator(group).size, "experts")
    return batched(quantized.ep_dispatch_fp8(x, topk_ids, topk_weights, num_experts, block, group), experts)


def _triton(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Batched:  # fmt: skip
    experts = parallel.divide(num_experts, parallel.communicator(group).size, "experts")
    rows, scales, ids, weights, source = quantized.ep_dispatch_fp8(
        x, topk_ids, topk_weights, num_experts, block, group
    )
    rows, packed, counts, weights, source = rows_of.pack((rows, ids, weights, source), experts, scales)
    assert packed is not None
    return rows, packed, counts, weights, source


def _unsupported(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> str | None:  # fmt: skip
    return fp8_refusal(x.device) or rows_of.not_packed(x.shape[0], topk_ids.shape[1], group)


def _reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Batched:  # fmt: skip
    comm = parallel.communicator(group)
    parts = [exchange.gathered("ep_dispatch_batched_fp8", t, group) for t in (x, topk_ids, topk_weights)]
    return reference(parts[0], parts[1], parts[2], num_experts, block)[comm.rank]


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Batched:  # fmt: skip
    size = parallel.communicator(group).size
    experts, rows = num_experts // size, size * x.shape[0]
    return (
        x.new_empty(experts, rows, x.shape[1], dtype=FP8),
        x.new_empty(experts, rows, x.shape[1] // block, dtype=torch.float32),
        topk_ids.new_empty(experts, dtype=torch.int32),
        topk_weights.new_empty(experts, rows),
        topk_ids.new_empty(experts, rows, dtype=torch.int32),
    )


ep_dispatch_batched_fp8 = define(
    "ep_dispatch_batched_fp8(Tensor x, Tensor topk_ids, Tensor topk_weights, int num_experts, int block=128,"
    " str group=\"tp\") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="ep_dispatch_batched_fp8",
    level=2,
    reference=reference,
    op=ep_dispatch_batched_fp8,
    calls=("ep_dispatch_fp8",),
    ranks="ranks",
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("topk_ids", "tokens topk", "int32", values=plain.routed),
        Tensor("topk_weights", "tokens topk", "float32"),
        Scalar("num_experts", "experts"),
        Scalar("block", default=128),
        Scalar("group", default="tp"),
    ),
    outputs=(
        Tensor("rows", "local ranks*tokens hidden", "float8_e4m3fn"),
        Tensor("scales", "local ranks*tokens blocks", "float32"),
        Tensor("counts", "local", "int32"),
        Tensor("weights", "local ranks*tokens", "float32"),
        Tensor("source", "local ranks*tokens", "int32"),
    ),
    axes={
        "ranks": Axis.option(2),
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "blocks": Axis(Expr("hidden // block")),
        "topk": Axis.option(),
        "experts": Axis.option(),
        "local": Axis(Expr("experts // ranks")),
    },
    constraints=("topk <= experts", "experts % ranks == 0", "hidden % block == 0"),
    flops="4 * tokens * hidden",
    traffic="(ranks - 1) * tokens * (hidden + 4 * blocks + 8 * topk)",
    tolerance=quantized.SPEC.tolerance,
    cases=(
        Case("deepseek_decode", {"tokens": 16, "hidden": 7168, "topk": 8, "experts": 256}, weight=64, tags=("model",)),
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048, "topk": 8, "experts": 128}, weight=64, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 4, "topk": 1, "experts": 6, "block": 4}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 64, "topk": 3, "experts": 12, "block": 64}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1152, "topk": 2, "experts": 6}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 256, "topk": 6, "experts": 6, "block": 256}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 96, "topk": 1, "experts": 60, "block": 32}, tags=("odd",)),
    ),
)  # fmt: skip
