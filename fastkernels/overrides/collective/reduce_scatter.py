"""The sum of all ranks' tensors, of which every rank gets its own part of the rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange, words
from fastkernels.overrides.collective.all_reduce import SMALL


def reference(x: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [ranks * T, ...] of each rank. Rank r gets rows r T .. (r + 1) T of the sum, in x's dtype."""
    return [part.to(t.dtype) for part, t in zip(exchange.total(x).chunk(len(x)), x, strict=True)]


def rows(x: torch.Tensor, group: str) -> int:
    """The rows of a rank's part. Raises ValueError if they cannot be divided."""
    return parallel.divide(x.shape[0], parallel.communicator(group).size, "rows")


def _shared(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm, n = parallel.communicator(group), rows(x, group)
    parts = [t[comm.rank * n : (comm.rank + 1) * n] for t in exchange.exchanged("reduce_scatter", x, group)]
    return torch.add(*parts) if len(parts) == 2 else exchange.total(parts).to(x.dtype)


def _process_group(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    out = torch.empty((rows(x, group), *x.shape[1:]), dtype=x.dtype, device=x.device)
    comm.arrive("reduce_scatter", x)
    # The name in torch 2.13, and the one in older versions.
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with comm.naming("reduce_scatter"):
        scatter(out, x.contiguous(), group=comm.process_group)
    return out


def _triton(x: torch.Tensor, group: str = "tp", small: int = -1) -> torch.Tensor:
    x = x.contiguous()
    symmetric = exchange.symmetric_of("reduce_scatter", x, group)
    if small < 0:
        small = words.is_small(x, group, symmetric.size) and x.nbytes <= 2 * SMALL
    if small:
        return words.scatter_words(x, symmetric).view(rows(x, group), *x.shape[1:])
    return exchange.launch(x, symmetric, symmetric.size, True).view(rows(x, group), *x.shape[1:])


def _fits(params: dict[str, int], x: torch.Tensor, group: str = "tp") -> bool:
    return params["small"] == 0 or words.is_small(x, group, parallel.communicator(group).size)


def _unsupported(x: torch.Tensor, group: str = "tp") -> str | None:
    return exchange.unsupported(x, group, parallel.communicator(group).size, True)


def _reference(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    return (
        exchange.total(exchange.gathered("reduce_scatter", x, group)).chunk(comm.size)[comm.rank].to(x.dtype)
    )


reduce_scatter = define(
    'reduce_scatter(Tensor x, str group="tp") -> Tensor',
    fake=lambda x, group="tp": torch.empty(
        (x.shape[0] // parallel.communicator(group).size, *x.shape[1:]), dtype=x.dtype, device=x.device
    ),
    providers=(
        exchange.alone(lambda x, group="tp": x.clone(memory_format=torch.contiguous_format)),
        exchange.shared("reduce_scatter", _shared),
        *exchange.over_group(_process_group),
        Provider("triton", _triton, supports=_unsupported, params=({"small": 0}, {"small": 1}), fits=_fits),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name="reduce_scatter",
    level=1,
    reference=reference,
    op=reduce_scatter,
    ranks="ranks",
    arguments=(Tensor("x", "ranks*tokens hidden"), Scalar("group", default="tp")),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks - 1) * tokens * hidden",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("decode_32", {"tokens": 16, "hidden": 4096}, weight=64, tags=("model",)),
        Case("prefill_2k", {"tokens": 1024, "hidden": 4096}, weight=4, tags=("model",)),
        Case("prefill_8k", {"tokens": 4096, "hidden": 8192}, weight=1, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
