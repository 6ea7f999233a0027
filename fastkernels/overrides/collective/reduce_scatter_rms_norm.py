"""A rank's rows of the sum of all ranks' tensors, the residual added to them, and their RMS norm: sequence parallel."""

from __future__ import annotations

import torch

from fastkernels.core import parallel
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.reduce_scatter import reduce_scatter
from fastkernels.overrides.collective.reduce_scatter import reference as scattered
from fastkernels.overrides.norm import rms_norm as norms

T = torch.Tensor


def reference(
    x: list[T], weight: list[T], eps: float, residual: list[T | None] | None = None, group: str = "tp"
) -> list[tuple[T, T | None]]:
    """x: [ranks * T, H] and residual: [T, H] of each rank; weight [H] is the same in all. In at least float32.

    Returns for each rank (norm of its rows of the sum and the residual, these sums), in x's dtype.
    """
    acc = torch.promote_types(x[0].dtype, torch.float32)
    found = []
    for part, t, w, r in zip(
        scattered([t.to(acc) for t in x]), x, weight, residual or [None] * len(x), strict=True
    ):
        out, added = norms.reference(part, w.to(acc), eps, None if r is None else r.to(acc))
        found.append((out.to(t.dtype), None if added is None else added.to(t.dtype)))
    return found


def _composed(x: T, weight: T, eps: float, residual: T | None = None, group: str = "tp") -> T:
    return norms.rms_norm(reduce_scatter(x, group), weight, eps, residual)


def _reference(x: T, weight: T, eps: float, residual: T | None = None, group: str = "tp") -> T:
    comm = parallel.communicator(group)
    every = exchange.gathered("reduce_scatter_rms_norm", x, group)
    part = scattered(every)[comm.rank]
    out, added = norms.reference(part, weight, eps, residual)
    if residual is not None and added is not None:
        residual.copy_(added)
    return out


reduce_scatter_rms_norm = define(
    "reduce_scatter_rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None, str group='tp') -> Tensor",
    fake=lambda x, weight, eps, residual=None, group="tp": torch.empty(
        (x.shape[0] // parallel.communicator(group).size, *x.shape[1:]), dtype=x.dtype, device=x.device
    ),
    providers=(
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="reduce_scatter_rms_norm",
    level=2,
    reference=reference,
    op=reduce_scatter_rms_norm,
    calls=("reduce_scatter", "rms_norm"),
    ranks="ranks",
    replicated=("weight",),
    arguments=(
        Tensor("x", "ranks*tokens hidden"),
        Tensor("weight", "hidden", mean=1, std=0.1),
        Scalar("eps", default=1e-5),
        Tensor("residual", "tokens hidden", when="residual", mutated=True),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks + 4) * tokens * hidden",
    traffic="(ranks - 1) * tokens * hidden * itemsize(dtype)",
    activations=("x", "residual"),
    cases=(
        Case("decode_32", {"tokens": 16, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("prefill_2k", {"tokens": 1024, "hidden": 4096, "residual": True}, weight=4, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576, "residual": True}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 31, "hidden": 1000, "residual": True}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "residual": True}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
