"""A row-parallel linear layer: the product with this rank's columns of the weight, summed over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.collective import exchange, pieces
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.linear.linear import linear


def reference(x: list[torch.Tensor], weight: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [T, K / ranks], weight: [N, K / ranks] of each rank. Computed in at least float32; returns x's dtype."""
    acc = torch.promote_types(x[0].dtype, torch.float32)
    summed = exchange.total([t.to(acc) @ w.to(acc).t() for t, w in zip(x, weight, strict=True)])
    return [summed.to(t.dtype) for t in x]


def _composed(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    return all_reduce(linear(x, weight), group)


def _overlapped(x: torch.Tensor, weight: torch.Tensor, group: str = "tp", number: int = -1) -> torch.Tensor:
    comm = parallel.communicator(group)
    comm.arrive("linear_all_reduce", x)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    with pieces.started(comm, "linear_all_reduce") as start:
        for first, end in pieces.bounds(len(x), pieces.number_of(len(x)) if number < 0 else number):
            pieces.product(x[first:end], weight, out[first:end])
            start(dist.all_reduce(out[first:end], group=comm.process_group, async_op=True))
    return out


def _reference(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    return all_reduce(x.to(acc) @ weight.to(acc).t(), group).to(x.dtype)


linear_all_reduce = define(
    'linear_all_reduce(Tensor x, Tensor weight, str group="tp") -> Tensor',
    fake=lambda x, weight, *_: torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        pieces.overlapped(_overlapped),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name="linear_all_reduce",
    level=2,
    reference=reference,
    op=linear_all_reduce,
    calls=("linear", "all_reduce"),
    ranks="ranks",
    same_bits=True,
    arguments=(
        Tensor("x", "tokens k"),
        Tensor("weight", "n k", values=fan_in),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens n"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "n": Axis.width(), "k": Axis.width()},
    flops="2 * tokens * n * k",
    traffic="2 * (ranks - 1) * tokens * n * itemsize(dtype) / ranks",
    cases=(
        Case("llama_o_2k", {"tokens": 2048, "n": 4096, "k": 2048}, weight=4, tags=("model",)),
        Case("llama_down_2k", {"tokens": 2048, "n": 4096, "k": 7168}, weight=4, tags=("model",)),
        Case("smollm2_o", {"tokens": 7, "n": 576, "k": 192}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "n": 1, "k": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "n": 100, "k": 63}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "n": 128, "k": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "n": 257, "k": 40}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "n": 5, "k": 9}, tags=("odd",)),
    ),
)
