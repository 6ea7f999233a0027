"""Every rank sends one part of its rows to each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.reduce_scatter import rows


def reference(x: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [ranks * T, ...] of each rank. Rank r gets part r of every rank's rows, in order of rank: [ranks * T, ...]."""
    parts = [t.chunk(len(x)) for t in x]
    return [torch.cat([part[r] for part in parts]) for r in range(len(x))]


def _shared(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm, n = parallel.communicator(group), rows(x, group)
    return torch.cat(
        [t[comm.rank * n : (comm.rank + 1) * n] for t in exchange.exchanged("all_to_all", x, group)]
    )


def _process_group(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    rows(x, group)
    comm.arrive("all_to_all", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with comm.naming("all_to_all"):
        dist.all_to_all_single(out, x.contiguous(), group=comm.process_group)
    return out


def _triton(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    symmetric = exchange.symmetric_of("all_to_all", x, group)
    rows(x, group)
    return exchange.launch(x.contiguous(), symmetric, symmetric.size, False).view(x.shape)


def _unsupported(x: torch.Tensor, group: str = "tp") -> str | None:
    return exchange.unsupported(x, group, parallel.communicator(group).size)


def _reference(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    parts = exchange.gathered("all_to_all", x, group)
    return torch.cat([t.chunk(comm.size)[comm.rank] for t in parts])


all_to_all = define(
    'all_to_all(Tensor x, str group="tp") -> Tensor',
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        exchange.alone(lambda x, group="tp": x.clone(memory_format=torch.contiguous_format)),
        exchange.shared("all_to_all", _shared, any_order=True),
        *exchange.over_group(_process_group),
        Provider("triton", _triton, supports=_unsupported),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name="all_to_all",
    level=1,
    reference=reference,
    op=all_to_all,
    ranks="ranks",
    arguments=(Tensor("x", "ranks*tokens hidden"), Scalar("group", default="tp")),
    outputs=(Tensor("out", "ranks*tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="0",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("decode_32", {"tokens": 16, "hidden": 4096}, weight=64, tags=("model",)),
        Case("prefill_2k", {"tokens": 1024, "hidden": 4096}, weight=4, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
