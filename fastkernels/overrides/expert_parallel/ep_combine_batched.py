"""Expert parallelism for decodes: the way back of `ep_dispatch_batched`, with the weights of experts.

The contract of vLLM's finalize step for the batched format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2

MOST_ROWS = 4096  # of all ranks, whose sources one program holds
EXPERTS, CHANNELS = 16, 512  # that one program adds at once


def reference(
    x: list[torch.Tensor], weights: list[torch.Tensor], source: list[torch.Tensor], group: str = "tp"
) -> list[torch.Tensor]:
    """x: [E, ranks * T, H] of each rank, weights and source: as `ep_dispatch_batched` returned them.

    Rows with the source -1 are ignored; an expert has a source once. Returns [T, H] of each rank: the sum over the
    experts of all ranks of weight times row, in at least float32, in x's dtype. Tokens without a row are zero.
    """
    every = zip(x, weights, source, strict=True)
    total = exchange.total([_summed(t, w, s) for t, w, s in every])
    return [part.to(t.dtype) for part, t in zip(total.chunk(len(x)), x, strict=True)]


def _check(x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor) -> None:
    if x.dim() != 3 or not x.shape[:2] == weights.shape == source.shape or source.is_floating_point():
        found = ", ".join(f"{tuple(t.shape)}" for t in (x, weights, source))
        raise ValueError(
            "ep_combine_batched takes x [E, ranks * T, H], its weights [E, ranks * T] and its sources [E, ranks * T] in"
            f" int32, got {found} in {source.dtype}"
        )


def _summed(x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The sum over this rank's experts, [ranks * T, H]. The order of additions is fixed."""
    acc = torch.promote_types(x.dtype, torch.float32)
    experts, rows, hidden = x.shape
    weighted = torch.where(source[..., None] < 0, 0, x.to(acc) * weights[..., None].to(acc))
    at = torch.where(source < 0, rows, source).long()
    placed = torch.zeros(experts, rows + 1, hidden, dtype=acc, device=x.device)
    placed.scatter_(1, at[..., None].expand_as(weighted), weighted)
    return placed.sum(0)[:rows]


def _composed(
    x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, group: str = "tp"
) -> torch.Tensor:
    _check(x, weights, source)
    # In float32: sums of a rank that were rounded to bfloat16 first exceed the judge's tolerance.
    return reduce_scatter(_summed(x, weights, source), group).to(x.dtype)


@triton.jit(do_not_specialize=["every"])
def _sum_kernel(
    x_ptr, weights_ptr, source_ptr, out_ptr, experts, every, H,
    EVERY: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program (t, b) adds block b of the rows of token t: EXPERTS experts at once, in a fixed order.
    t, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, inside = tl.arange(0, EVERY), cols < H
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        mask = (e < experts)[:, None] & (i < every)[None, :]
        source = tl.load(source_ptr + e[:, None] * every + i[None, :], mask=mask, other=-1)
        at = tl.max(tl.where(source == t, i[None, :], -1), axis=1)
        there = at >= 0
        place = e.to(tl.int64) * every + at
        weight = tl.load(weights_ptr + place, mask=there, other=0.0).to(tl.float32)
        mask = there[:, None] & inside[None, :]
        row = tl.load(x_ptr + place[:, None] * H + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(row * weight[:, None], axis=0)
    tl.store(out_ptr + t.to(tl.int64) * H + cols, total, mask=inside)


def summed(x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`_summed` as one kernel, in float32, for a call that `_unsupported` accepted."""
    experts, every, hidden = x.shape
    out = torch.empty(every, hidden, dtype=torch.float32, device=x.device)
    if out.numel():
        wide = next_power_of_2(every)
        _sum_kernel[(every, cdiv(hidden, CHANNELS))](
            x.contiguous(), weights.contiguous(), source.contiguous(), out, experts, every, hidden, EVERY=wide,
            EXPERTS=min(next_power_of_2(experts), max(1, MOST_ROWS // wide), EXPERTS),
            BLOCK=min(next_power_of_2(hidden), CHANNELS),
        )  # fmt: skip
    return out


def _triton(x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    _check(x, weights, source)
    return reduce_scatter(summed(x, weights, source), group).to(x.dtype)


def _unsupported(
    x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, group: str = "tp"
) -> str | None:
    if x.dtype not in exchange.SUMS:
        return f"sums are in float32, bfloat16 or float16, not in {x.dtype}"
    return f"{x.shape[1]} rows of all ranks: at most {MOST_ROWS}" if x.shape[1] > MOST_ROWS else None


def _reference(
    x: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, group: str = "tp"
) -> torch.Tensor:
    comm = parallel.communicator(group)
    parts = exchange.gathered("ep_combine_batched", _summed(x, weights, source), group)
    return exchange.total(parts).chunk(comm.size)[comm.rank].to(x.dtype)


ep_combine_batched = define(
    'ep_combine_batched(Tensor x, Tensor weights, Tensor source, str group="tp") -> Tensor',
    fake=lambda x, weights, source, group="tp": x.new_empty(
        x.shape[1] // parallel.communicator(group).size, x.shape[2]
    ),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)


def sources(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For each expert some of all tokens in ascending order, then -1."""
    wanted = call.rand(*shape) < 0.3
    order = torch.argsort(~wanted, dim=1, stable=True)
    return torch.where(wanted.gather(1, order), order, -1).to(dtype)


SPEC = OpSpec(
    name="ep_combine_batched",
    level=2,
    reference=reference,
    op=ep_combine_batched,
    calls=("reduce_scatter",),
    ranks="ranks",
    arguments=(
        Tensor("x", "local ranks*tokens hidden"),
        Tensor("weights", "local ranks*tokens", "float32"),
        Tensor("source", "local ranks*tokens", "int32", values=sources),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={
        "ranks": Axis.option(2),
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "local": Axis.option(),
    },
    flops="2 * local * ranks * tokens * hidden",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048, "local": 64}, weight=64, tags=("model",)),
        Case("mixtral_decode_8", {"tokens": 4, "hidden": 4096, "local": 4}, weight=16, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1, "local": 3}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 100, "local": 6}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128, "local": 3}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "local": 3}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5, "local": 30}, tags=("odd",)),
    ),
)
