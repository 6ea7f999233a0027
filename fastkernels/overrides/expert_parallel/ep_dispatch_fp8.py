"""Expert parallelism with half the bytes: `ep_dispatch` of rows in float8 e4m3 with a scale per block of channels.

The payload of DeepSeek-V3's dispatch (arXiv 2412.19437, section 3.3): a row is quantized before it is sent.
"""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor, Tolerance
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.all_gather import all_gather
from fastkernels.overrides.expert_parallel import ep_dispatch as plain
from fastkernels.overrides.kit.fp8 import FP8, GROUP_EPS, fp8_refusal, quantize_rows
from fastkernels.overrides.quant.quantize_fp8 import quantize_fp8

Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: list[torch.Tensor],
    topk_ids: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    block: int = 128,
    group: str = "tp",
) -> list[Dispatched]:
    """Arguments and order as in `ep_dispatch`; block: channels of a scale, of which H is a multiple.

    Returns for each rank (rows [ranks * T, H] in float8 e4m3, scales [ranks * T, H / block] in float32, ids, weights,
    source). A scale maps the block's absolute maximum to 448; rows and scales of tokens without an expert there are 0.
    A float64 x gives float64 rows that are not rounded.
    """
    found = []
    parts = [
        quantize_rows(t.to(torch.promote_types(t.dtype, torch.float32)), None, block, None, GROUP_EPS, False)
        for t in x
    ]
    every = torch.cat([q for q, _ in parts]), torch.cat(topk_ids), torch.cat(topk_weights)
    scales = torch.cat([s for _, s in parts])
    for rank in range(len(x)):
        rows, ids, weights, source = plain.own_part(every, num_experts, rank, len(x))
        found.append((rows, _at(scales, source), ids, weights, source))
    return found


def _at(scales: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.where(source[:, None] < 0, 0, scales[source.clamp(min=0).long()])


def _composed(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Dispatched:  # fmt: skip
    plain.check_routing(x, topk_ids, topk_weights)
    comm, call = parallel.communicator(group), f"ep_dispatch_fp8 to {num_experts} experts"
    q, scales = quantize_fp8(x, None, block, None, GROUP_EPS)
    rows, every_scale, ids, weights = exchange.gathered_tensors(
        call, all_gather, (q, scales, topk_ids, topk_weights), group
    )
    rows, ids, weights, source = plain.own_part((rows, ids, weights), num_experts, comm.rank, comm.size)
    return rows, _at(every_scale, source), ids, weights, source


def _reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Dispatched:  # fmt: skip
    comm = parallel.communicator(group)
    q, scales = quantize_rows(x.to(torch.float32), None, block, None, GROUP_EPS, False)
    parts = [
        torch.cat(exchange.gathered("ep_dispatch_fp8", t, group))
        for t in (q.view(torch.uint8), scales, topk_ids, topk_weights)
    ]
    rows, ids, weights, source = plain.own_part(
        (parts[0].view(FP8), parts[2], parts[3]), num_experts, comm.rank, comm.size
    )
    return rows, _at(parts[1], source), ids, weights, source


def _triton(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Dispatched:  # fmt: skip
    return plain.launch("ep_dispatch_fp8", x, topk_ids, topk_weights, num_experts, group, block, GROUP_EPS)


def _unsupported(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> str | None:  # fmt: skip
    return fp8_refusal(x.device) or plain.not_launched(x, topk_ids, topk_weights, group, block)


def _measured(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> str | None:  # fmt: skip
    """For groups in which this kernel was measured, see measure.choose_experts."""
    reason = plain.not_measured("ep_dispatch_fp8", x.numel(), group)
    return reason or _unsupported(x, topk_ids, topk_weights, num_experts, block, group)


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, block: int = 128,
    group: str = "tp",
) -> Dispatched:  # fmt: skip
    tokens, hidden = x.shape[0] * parallel.communicator(group).size, x.shape[1]
    k = topk_ids.shape[1]
    return (
        torch.empty((tokens, hidden), dtype=FP8, device=x.device),
        torch.empty((tokens, hidden // block), dtype=torch.float32, device=x.device),
        torch.empty((tokens, k), dtype=torch.int32, device=x.device),
        torch.empty((tokens, k), dtype=topk_weights.dtype, device=x.device),
        torch.empty(tokens, dtype=torch.int32, device=x.device),
    )


ep_dispatch_fp8 = define(
    "ep_dispatch_fp8(Tensor x, Tensor topk_ids, Tensor topk_weights, int num_experts, int block=128,"
    " str group=\"tp\") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("measured", _triton, supports=_measured),
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="ep_dispatch_fp8",
    level=2,
    reference=reference,
    op=ep_dispatch_fp8,
    calls=("quantize_fp8", "all_gather"),
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
        Tensor("rows", "ranks*tokens hidden", "float8_e4m3fn"),
        Tensor("scales", "ranks*tokens blocks", "float32"),
        Tensor("ids", "ranks*tokens topk", "int32"),
        Tensor("weights", "ranks*tokens topk", "float32"),
        Tensor("source", "ranks*tokens", "int32"),
    ),
    axes={
        "ranks": Axis.option(2),
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "blocks": Axis(Expr("hidden // block")),
        "topk": Axis.option(),
        "experts": Axis.option(),
    },
    constraints=("topk <= experts", "experts % ranks == 0", "hidden % block == 0"),
    flops="4 * tokens * hidden",
    traffic="(ranks - 1) * tokens * (hidden + 4 * blocks + 8 * topk)",
    # As in quantize_fp8: a scale may differ in its last bit, values are compared with the unrounded quotient.
    tolerance={
        **dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(0.0, 2.5e-7)),
        "float8_e4m3fn": Tolerance(0.98e-3, 0.06251),
    },
    cases=(
        Case("deepseek_decode", {"tokens": 16, "hidden": 7168, "topk": 8, "experts": 256}, weight=64, tags=("model",)),
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048, "topk": 8, "experts": 128}, weight=64, tags=("model",)),
        Case("qwen3_prefill", {"tokens": 1024, "hidden": 2048, "topk": 8, "experts": 128}, weight=4, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 4, "topk": 1, "experts": 6, "block": 4}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 128, "topk": 3, "experts": 12, "block": 64}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1152, "topk": 2, "experts": 6}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 128, "topk": 6, "experts": 6}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 96, "topk": 1, "experts": 60, "block": 32}, tags=("odd",)),
    ),
)  # fmt: skip
