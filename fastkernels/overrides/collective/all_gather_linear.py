"""A column-parallel linear layer behind activations that are divided by rows: all rows, times this rank's weight."""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.collective import exchange, pieces
from fastkernels.overrides.collective.all_gather import all_gather
from fastkernels.overrides.linear.linear import linear


def reference(x: list[torch.Tensor], weight: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [T, K], weight: [N / ranks, K] of each rank. Every rank gets [ranks * T, N / ranks], in x's dtype.

    Computed in at least float32.
    """
    acc = torch.promote_types(x[0].dtype, torch.float32)
    rows = torch.cat([t.to(acc) for t in x])
    return [(rows @ w.to(acc).t()).to(t.dtype) for t, w in zip(x, weight, strict=True)]


def _composed(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    return linear(all_gather(x, group), weight)


def _overlapped(x: torch.Tensor, weight: torch.Tensor, group: str = "tp", number: int = -1) -> torch.Tensor:
    """This rank's rows are multiplied first, while the first piece of the others' comes."""
    comm, n, width = parallel.communicator(group), len(x), weight.shape[0]
    comm.arrive("all_gather_linear", x)
    x = x.contiguous()
    out = torch.empty((comm.size, n, width), dtype=x.dtype, device=x.device)
    spans = pieces.bounds(n, pieces.number_of(n) if number < 0 else number)
    coming = []
    with comm.naming("all_gather_linear"):
        for first, end in spans:
            every = torch.empty((comm.size, end - first, x.shape[1]), dtype=x.dtype, device=x.device)
            coming.append((every, pieces.gather(every.flatten(0, 1), x[first:end], comm)))
        pieces.product(x, weight, out[comm.rank])
        for (first, end), (every, work) in zip(spans, coming, strict=True):
            work.wait()
            for rank in range(comm.size):
                if rank != comm.rank:
                    pieces.product(every[rank], weight, out[rank, first:end])
    return out.flatten(0, 1)


def _reference(x: torch.Tensor, weight: torch.Tensor, group: str = "tp") -> torch.Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    return (all_gather(x, group).to(acc) @ weight.to(acc).t()).to(x.dtype)


all_gather_linear = define(
    'all_gather_linear(Tensor x, Tensor weight, str group="tp") -> Tensor',
    fake=lambda x, weight, group="tp": torch.empty(
        (x.shape[0] * parallel.communicator(group).size, weight.shape[0]), dtype=x.dtype, device=x.device
    ),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        pieces.overlapped(_overlapped),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name="all_gather_linear",
    level=2,
    reference=reference,
    op=all_gather_linear,
    calls=("all_gather", "linear"),
    ranks="ranks",
    arguments=(
        Tensor("x", "tokens k"),
        Tensor("weight", "n k", values=fan_in),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "ranks*tokens n"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "n": Axis.width(), "k": Axis.width()},
    flops="2 * ranks * tokens * n * k",
    traffic="(ranks - 1) * tokens * k * itemsize(dtype)",
    cases=(
        Case("llama_qkv_2k", {"tokens": 1024, "n": 3072, "k": 4096}, weight=4, tags=("model",)),
        Case("llama_up_2k", {"tokens": 1024, "n": 14336, "k": 4096}, weight=4, tags=("model",)),
        Case("smollm2_qkv", {"tokens": 4, "n": 480, "k": 576}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "n": 1, "k": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "n": 100, "k": 63}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "n": 96, "k": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "n": 257, "k": 40}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "n": 5, "k": 9}, tags=("odd",)),
    ),
)
