"""Expert parallelism: every rank gets the sum of what the experts of all ranks computed for its tokens.

The contract of vLLM's finalize step: the way back of `ep_dispatch`. The weights of experts are applied before.
"""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Call, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter


def reference(x: list[torch.Tensor], source: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: [ranks * T, H], source: [ranks * T] int32 of each rank: row i is of token source[i] = rank * T + token.

    Rows with the source -1 are ignored; no source is there twice. Returns [T, H] of each rank: the sum over ranks, in
    order of rank and in at least float32, in x's dtype. Tokens without a row are zero.
    """
    acc = torch.promote_types(x[0].dtype, torch.float32)
    total = exchange.total([_placed(t.to(acc), s) for t, s in zip(x, source, strict=True)])
    return [part.to(t.dtype) for part, t in zip(total.chunk(len(x)), x, strict=True)]


def _placed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows at their sources, zero elsewhere. Does not synchronize with the device."""
    rows = x.shape[0]
    out = torch.zeros((rows + 1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    out[torch.where(source < 0, rows, source).long()] = x
    return out[:rows]


def _composed(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    return reduce_scatter(_placed(x, source), group)


def _reference(x: torch.Tensor, source: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    placed = _placed(x, source)
    parts = exchange.gathered("ep_combine", placed, group) if comm.size > 1 else [placed]
    return exchange.total(parts).chunk(comm.size)[comm.rank].to(x.dtype)


ep_combine = define(
    'ep_combine(Tensor x, Tensor source, str group="tp") -> Tensor',
    fake=lambda x, source, group="tp": torch.empty(
        (x.shape[0] // parallel.communicator(group).size, *x.shape[1:]), dtype=x.dtype, device=x.device
    ),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)


def sources(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Some of all tokens in ascending order, then -1."""
    rows = shape[0]
    wanted = call.rand(rows) < 0.7
    order = torch.argsort(~wanted, stable=True)
    return torch.where(wanted[order], order, -1).to(dtype)


SPEC = OpSpec(
    name="ep_combine",
    level=2,
    reference=reference,
    op=ep_combine,
    calls=("reduce_scatter",),
    ranks="ranks",
    arguments=(
        Tensor("x", "ranks*tokens hidden"),
        Tensor("source", "ranks*tokens", "int32", values=sources),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks - 1) * tokens * hidden",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    cases=(
        Case("qwen3_decode_32", {"tokens": 16, "hidden": 2048}, weight=64, tags=("model",)),
        Case("qwen3_prefill_2k", {"tokens": 1024, "hidden": 2048}, weight=4, tags=("model",)),
        Case("mixtral_decode_8", {"tokens": 4, "hidden": 4096}, weight=16, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
