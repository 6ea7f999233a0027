"""A row-parallel linear layer whose result stays divided by rows: the products summed, each rank with its part."""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.collective import exchange, pieces
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter, rows
from fastkernels.overrides.collective.reduce_scatter import reference as scattered
from fastkernels.overrides.linear.linear import linear


def reference(x: list[torch.Tensor], weight: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [ranks * T, K / ranks], weight: [N, K / ranks] of each rank. In at least float32.

    Rank r gets rows r T .. (r + 1) T of the summed products, in x's dtype.
    """
    acc = torch.promote_types(x[0].dtype, torch.float32)
    parts = scattered([t.to(acc) @ w.to(acc).t() for t, w in zip(x, weight, strict=True)])
    return [part.to(t.dtype) for part, t in zip(parts, x, strict=True)]


def _composed(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    return reduce_scatter(linear(x, weight), group)


def _overlapped(x: torch.Tensor, weight: torch.Tensor, group: str = "tp", number: int = -1) -> torch.Tensor:
    """A piece has the same rows of the parts of all ranks, so that each rank gets rows of its own from each piece."""
    comm, n = parallel.communicator(group), rows(x, group)
    comm.arrive("linear_reduce_scatter", x)
    out = torch.empty((n, weight.shape[0]), dtype=x.dtype, device=x.device)
    with pieces.started(comm, "linear_reduce_scatter") as start:
        for first, end in pieces.bounds(n, pieces.number_of(n) if number < 0 else number):
            part = torch.empty((comm.size, end - first, weight.shape[0]), dtype=x.dtype, device=x.device)
            for rank in range(comm.size):
                pieces.product(x[rank * n + first : rank * n + end], weight, part[rank])
            start(pieces.scatter(out[first:end], part.flatten(0, 1), comm))
    return out


def _reference(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    return reduce_scatter(x.to(acc) @ weight.to(acc).t(), group).to(x.dtype)


linear_reduce_scatter = define(
    'linear_reduce_scatter(Tensor x, Tensor weight, str group="tp") -> Tensor',
    fake=lambda x, weight, group="tp": torch.empty(
        (x.shape[0] // parallel.communicator(group).size, weight.shape[0]), dtype=x.dtype, device=x.device
    ),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        pieces.overlapped(_overlapped, divided=True),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name="linear_reduce_scatter",
    level=2,
    reference=reference,
    op=linear_reduce_scatter,
    calls=("linear", "reduce_scatter"),
    ranks="ranks",
    arguments=(
        Tensor("x", "ranks*tokens k"),
        Tensor("weight", "n k", values=fan_in),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens n"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "n": Axis.width(), "k": Axis.width()},
    flops="2 * ranks * tokens * n * k",
    traffic="(ranks - 1) * tokens * n * itemsize(dtype)",
    cases=(
        Case("llama_o_2k", {"tokens": 1024, "n": 4096, "k": 2048}, weight=4, tags=("model",)),
        Case("llama_down_2k", {"tokens": 1024, "n": 4096, "k": 7168}, weight=4, tags=("model",)),
        Case("smollm2_o", {"tokens": 4, "n": 576, "k": 192}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "n": 1, "k": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "n": 100, "k": 63}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "n": 96, "k": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "n": 257, "k": 40}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "n": 5, "k": 9}, tags=("odd",)),
    ),
)
